"""Kalman attention maps: how much each token weighs in each read-out (App. ``sec:attn-matrix``)."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from torch import Tensor


def plot_attention_maps(
    maps: Tensor, titles: Sequence[str] | None = None, tokens: Sequence[object] | None = None
) -> Figure:
    """Matrices side by side, each on a symmetric colour scale up to its own largest weight.

    Args:
        maps: one matrix per channel, ``[C, T, T]``, as ``evaluation.uncertainty.attention_maps``
            gives them for one sequence.
        titles: one per matrix.
        tokens: what to write along both axes, if it is short enough to be read.

    Returns:
        The figure.
    """
    C, T = maps.shape[0], maps.shape[-1]
    figure = Figure(figsize=(3.2 * C + 0.8, 3.4), layout="constrained")
    axes = figure.subplots(1, C, squeeze=False)[0]
    for i, axis in enumerate(axes):
        # Channels differ by orders of magnitude: on a common scale all but one would be blank.
        largest = float(maps[i].abs().max())
        shares = maps[i].float().numpy() / (largest or 1.0)
        image = axis.imshow(shares, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
        title = titles[i] if titles is not None else f"channel {i}"
        axis.set_title(f"{title}, largest {largest:.2g}", fontsize=9)
        axis.set_xlabel("token s")
        if tokens is not None and T <= 40:
            labels = [str(t) for t in tokens]
            axis.set_xticks(range(T), labels, rotation=90, fontsize=6)
            axis.set_yticks(range(T), labels, fontsize=6)
    axes[0].set_ylabel("read-out t")
    figure.colorbar(image, ax=list(axes), label="weight of v_s in y_t / largest")
    return figure
