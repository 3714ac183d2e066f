"""The first picture: a signal, what was seen of it, and the belief with its uncertainty."""

from pathlib import Path

import matplotlib.pyplot as plt
from torch import Tensor


def draw_belief(
    path: Path,
    signal: Tensor,
    values: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    observed: Tensor,
) -> None:
    """Draw the posterior over time and save it.

    Args:
        path: file to write; its ending says the format.
        signal: the truth, ``[T]``.
        values: noisy observations, ``[T]``.
        mean: posterior mean, ``[T]``.
        variance: posterior variance, ``[T]``.
        observed: which values the filter saw, ``[T]`` bool.
    """
    t = range(len(signal))
    band = 1.96 * variance.sqrt()
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    axes.fill_between(
        t, mean - band, mean + band, color="C0", alpha=0.25, lw=0, label="95 % belief"
    )
    axes.plot(t, signal, color="0.25", lw=1, ls="--", label="signal")
    axes.plot(t, mean, color="C0", lw=2, label="posterior mean")
    seen = observed.nonzero().flatten()
    axes.plot(seen, values[seen], ".", color="C1", ms=3, label="tokens seen")
    axes.set(xlabel="token", xlim=(0, len(signal) - 1))
    axes.legend(ncols=4, loc="upper right", frameon=False, fontsize=9)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.25)
    figure.savefig(path, dpi=150)
    plt.close(figure)
