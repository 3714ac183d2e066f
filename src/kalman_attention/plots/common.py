"""What figures share: colours and line styles, axes, and files."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

COLOURS = 10
"""Colours in matplotlib's default cycle."""
_STYLES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))


def line_style(i: int) -> dict[str, Any]:
    """Colour and line style of the i-th line of a figure; the first fifty are all different.

    The first ten lines are solid and differ in colour. Further lines repeat the colours with
    another line style.

    Args:
        i: index of the line, from 0.

    Returns:
        Keyword arguments of ``plot``.
    """
    return {"color": f"C{i % COLOURS}", "linestyle": _STYLES[i // COLOURS % len(_STYLES)]}


def small_axis(axis: Any, xlabel: str = "", ylabel: str = "", *, fontsize: int = 8) -> None:
    """Label an axis of a small panel, and give it a grid.

    Args:
        axis: matplotlib axes.
        xlabel: label of the horizontal axis; an empty one leaves the label as it is.
        ylabel: label of the vertical axis; an empty one leaves the label as it is.
        fontsize: size of the labels, in points.
    """
    if xlabel:
        axis.set_xlabel(xlabel, fontsize=fontsize)
    if ylabel:
        axis.set_ylabel(ylabel, fontsize=fontsize)
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=8)


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and as SVG; the same figure always gives the same bytes.

    Args:
        figure: the figure.
        path: path of the PNG; its folder is created if it does not exist.

    Returns:
        The paths of both files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing = path.with_suffix(".svg")
    figure.savefig(path, dpi=150)
    # Dates and random names would make every rendering of a committed figure a change.
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(drawing, metadata={"Date": None})
    return [path, drawing]
