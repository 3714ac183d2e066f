"""Learning curves: a metric over training, one panel per task, one line per model."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure


def plot_learning_curves(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    xlabel: str = "updates",
    ylabel: str = "accuracy",
) -> Figure:
    """Curves side by side on one vertical scale.

    Args:
        panels: title of a panel to its lines, name to points (x, y).
        xlabel: of all panels.
        ylabel: of the first in each row.

    Returns:
        The figure, with one legend.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.6 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    handles = {}
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        for name, points in lines.items():
            x, y = zip(*points, strict=True)
            (handles[name],) = axis.plot(x, y, color=colours[name], lw=1.5)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(xlabel, fontsize=8)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel(ylabel, fontsize=8)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize=8)
    return figure
