"""A series, what is known of it, and how well."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from numpy.typing import NDArray

Bands = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
"""Times, means, lower and upper ends."""


def plot_bands(
    times: NDArray[Any],
    values: NDArray[Any],
    parts: Sequence[Bands],
    *,
    level: float = 0.95,
    hidden: tuple[NDArray[Any], NDArray[Any]] | None = None,
    ylabel: str = "",
    axes: Any = None,
) -> Figure:
    """Draw values and bands.

    Args:
        times: of the values that were seen.
        values: what was seen.
        parts: bands; the first in hindsight, a second one is a forecast.
        level: of the bands, for the legend.
        hidden: times and values that were not seen, to compare with.
        ylabel: what the values are.
        axes: to draw into; by default a figure is made.
    """
    figure = axes.figure if axes is not None else plt.figure(figsize=(9, 3.2), layout="constrained")
    axes = axes if axes is not None else figure.add_subplot()
    for part, color, label in zip(
        parts, ("C0", "C2"), ("given all values", "forecast"), strict=False
    ):
        at, mean, lower, upper = part
        axes.fill_between(
            at, lower, upper, color=color, alpha=0.25, lw=0, label=f"{level:.0%}".replace("%", " %")
        )
        axes.plot(at, mean, color=color, lw=1.5, label=label)
    axes.plot(times, values, ".", color="0.25", ms=4, label="seen")
    if hidden is not None:
        axes.plot(*hidden, "x", color="C3", ms=4, label="hidden")
    axes.set_ylabel(ylabel)
    axes.legend(ncols=5, loc="upper right", frameon=False, fontsize=9)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.15 * (high - low))
    found: Figure = figure
    return found
