"""Figures as files."""

from pathlib import Path

from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG, and as SVG beside it.

    Args:
        figure: what to write.
        path: of the PNG; its folder is made if missing.

    Returns:
        Both paths.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [path, path.with_suffix(".svg")]
    for each in paths:
        figure.savefig(each, dpi=150)
    return paths
