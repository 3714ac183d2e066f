"""Figures as files."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG, and as SVG beside it; the same figure gives the same bytes.

    Args:
        figure: what to write.
        path: of the PNG; its folder is made if missing.

    Returns:
        Both paths.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing = path.with_suffix(".svg")
    figure.savefig(path, dpi=150)
    # Dates and random names would make every rendering of a committed figure a change.
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(drawing, metadata={"Date": None})
    return [path, drawing]
