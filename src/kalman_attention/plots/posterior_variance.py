"""The posterior variance over a sequence: where a model is sure, and which tokens made it so."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from torch import Tensor


def plot_posterior_variance(
    variance: Tensor,
    gain: Tensor | None = None,
    tokens: Sequence[object] | None = None,
    *,
    marked: Sequence[int] = (),
) -> Figure:
    """Variance of every channel over the tokens, with its mean and the mean Kalman gain below.

    Args:
        variance: posterior variance of one block's read-out for one sequence, ``[T, D]``.
        gain: Kalman gain of the same block, ``[T, D]``.
        tokens: what to write under the time axis, if it is short enough to be read.
        marked: positions to point out, such as those of the tokens to be copied.

    Returns:
        The figure.
    """
    T = variance.shape[0]
    rows = 2 if gain is None else 3
    figure = Figure(figsize=(max(6.0, min(14.0, 0.12 * T)), 2.2 * rows), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    order = variance.float().mean(0).argsort()
    image = axes[0].imshow(
        variance.float()[:, order].T.numpy(), aspect="auto", interpolation="nearest", origin="lower"
    )
    figure.colorbar(image, ax=axes[0], label="variance")
    axes[0].set_ylabel("channel (sorted)")
    axes[1].plot(variance.float().mean(1).numpy(), color="tab:blue")
    axes[1].set_ylabel("mean variance")
    if gain is not None:
        axes[2].bar(range(T), gain.float().mean(1).tolist(), color="tab:orange")
        axes[2].set_ylabel("mean gain")
    for axis in axes[1:]:
        for position in marked:
            axis.axvline(position, color="tab:red", lw=0.6, alpha=0.5, zorder=0)
    axes[-1].set_xlabel("token")
    if tokens is not None and T <= 80:
        axes[-1].set_xticks(range(T), [str(t) for t in tokens], rotation=90, fontsize=7)
    return figure
