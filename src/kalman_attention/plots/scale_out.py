"""The same run on one process and on many: loss curves, and how far they are apart."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure


def plot_scale_out(curves: Mapping[str, Sequence[float]], *, bound: float = 1e-5) -> Figure:
    """Losses over updates above, distances to the first curve below.

    Args:
        curves: name to the loss of every update; the first is the one to compare with.
        bound: a distance to mark.

    Returns:
        The figure.
    """
    (first, right), *rest = curves.items()
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    above.plot(range(1, len(right) + 1), right, color="0.75", lw=5, label=first)
    for i, (name, curve) in enumerate(rest):
        steps = range(1, len(curve) + 1)
        above.plot(steps, curve, ("-", "--", ":", "-.")[i % 4], color=f"C{i}", lw=1.3, label=name)
        # A distance of 0 has no logarithm; what is equal stands at the bottom.
        apart = [max(abs(x - y), 1e-8) for x, y in zip(curve, right, strict=True)]
        below.plot(steps, apart, ".", color=f"C{i}", ms=3)
    below.axhline(bound, color="0.4", lw=0.8, ls=":")
    below.set_yscale("log")
    below.set_xlabel("updates", fontsize=9)
    above.set_ylabel("loss, nats per byte", fontsize=9)
    below.set_ylabel(f"distance to {first}", fontsize=9)
    for axis in (above, below):
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    above.legend(fontsize=8)
    return figure
