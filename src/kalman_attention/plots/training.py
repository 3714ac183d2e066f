"""Training runs: learning curves, and accuracy as a function of sequence length."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from kalman_attention.plots.common import COLOURS, line_style, small_axis


def plot_learning_curves(
    panels: Mapping[str, Mapping[tuple[str, str], Sequence[tuple[float, float]]]],
    *,
    xlabel: str = "updates",
    ylabel: str = "accuracy",
) -> Figure:
    """Plot a metric over training, one panel per task and one line per model and variant.

    Up to ten models differ in colour, and their variants in line style.

    Args:
        panels: maps the title of a panel to its lines, and the model and variant of a line to
            points (x, y); a variant may be empty.
        xlabel: label of every horizontal axis.
        ylabel: label of the vertical axis, which the panels share.

    Returns:
        The figure, with one legend.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    styles = _styles([key for lines in panels.values() for key in lines])
    names = {key: " ".join(filter(None, key)) for key in styles}
    width = max(3.4 * columns, 5.0)
    fitting = min(6, int(19 * width / (8 + max(map(len, names.values())))))  # at 8 points
    below = 0.2 * -(-len(names) // fitting)
    figure = Figure(figsize=(width, 2.6 * rows + below), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    handles = {}
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        for key, points in lines.items():
            x, y = zip(*points, strict=True)
            dot = {"marker": "."} if len(points) < 3 else {}  # a model that learned at once
            (handles[key],) = axis.plot(x, y, **styles[key], **dot, lw=1.5)
        axis.set_title(title, fontsize=9)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        small_axis(axis, xlabel)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel(ylabel, fontsize=8)
    figure.legend(
        [handles[key] for key in names],
        list(names.values()),
        loc="outside lower center",
        ncols=fitting,
        fontsize=8,
    )
    return figure


def _styles(keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The style of the line of every model and variant, in the order of the legend."""
    models, variants = (list(dict.fromkeys(names)) for names in zip(*keys, strict=True))
    if len(models) > COLOURS:
        return {key: line_style(i) for i, key in enumerate(dict.fromkeys(keys))}
    there = [(m, v) for m in models for v in variants if (m, v) in keys]
    return {(m, v): line_style(models.index(m) + COLOURS * variants.index(v)) for m, v in there}


def plot_pretraining(
    records: Sequence[Mapping[str, Any]], batch_tokens: int, *, title: str = ""
) -> Figure:
    """Plot the training loss and the validation bits per byte of a run over tokens.

    Args:
        records: the records of ``metrics.jsonl``.
        batch_tokens: tokens per update.
        title: title of the figure.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    panels = (("train", "loss", "training loss, nats per token"),
              ("eval", "bits_per_byte", "validation bits per byte"))  # fmt: skip
    for axis, (kind, name, label) in zip(figure.subplots(1, 2), panels, strict=True):
        points = [
            (record["step"] * batch_tokens / 1e6, record[name])
            for record in records
            if record["kind"] == kind and record.get(name) is not None
        ]
        axis.plot(*zip(*points, strict=True), lw=1.2, marker="." if kind == "eval" else "")
        small_axis(axis, "million tokens", label)
    figure.suptitle(title, fontsize=9)
    return figure


def plot_comparison(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, skip: float = 0.1
) -> Figure:
    """Plot the validation bits per byte of several runs over tokens.

    Args:
        curves: maps the name of a run to pairs (tokens, bits per byte).
        skip: fraction of the run that is left out at the start, where all curves fall steeply.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axis = figure.subplots()
    for i, (name, points) in enumerate(curves.items()):
        begin = skip * points[-1][0]
        shown = [(tokens / 1e6, bits) for tokens, bits in points if tokens >= begin]
        axis.plot(*zip(*shown, strict=True), **line_style(i), lw=1.4, marker=".", label=name)
    small_axis(axis, "million tokens", "validation bits per byte", fontsize=9)
    axis.legend(fontsize=8)
    return figure


def plot_scale_out(curves: Mapping[str, Sequence[float]], *, bound: float = 1e-5) -> Figure:
    """Plot the loss of one run on different numbers of processes, and the differences.

    Args:
        curves: maps a name to the loss of every update; the others are compared with the first.
        bound: a difference to mark.

    Returns:
        The figure: losses in the upper panel, distances to the first curve in the lower one.
    """
    (first, right), *rest = curves.items()
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    above.plot(range(1, len(right) + 1), right, color="0.75", lw=5, label=first)
    for i, (name, curve) in enumerate(rest):
        steps = range(1, len(curve) + 1)
        # The curves coincide: dashes let the ones below be seen.
        above.plot(steps, curve, ("-", "--", ":", "-.")[i % 4], color=f"C{i}", lw=1.3, label=name)
        # A distance of 0 has no logarithm; equal losses are drawn at the bottom.
        apart = [max(abs(x - y), 1e-8) for x, y in zip(curve, right, strict=True)]
        below.plot(steps, apart, ".", color=f"C{i}", ms=3)
    below.axhline(bound, color="0.4", lw=0.8, ls=":")
    below.set_yscale("log")
    small_axis(above, ylabel="loss, nats per byte", fontsize=9)
    small_axis(below, "updates", f"distance to {first}", fontsize=9)
    above.legend(fontsize=8)
    return figure


def plot_accuracy_over_length(
    lengths: Sequence[int], panels: Mapping[str, Mapping[str, Sequence[float | None]]], trained: int
) -> Figure:
    """Plot the fraction of sequences that are entirely correct over their length.

    Args:
        lengths: lengths of the test sequences.
        panels: maps the title of a panel to its models, and a model to fractions between 0 and 1,
            one for each length; None is left out.
        trained: longest length in training, which is marked.

    Returns:
        The figure, with one line per model.
    """
    figure, row = plt.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 3.6), layout="constrained", squeeze=False
    )
    names = [*dict.fromkeys(name for models in panels.values() for name in models)]
    for axes, (title, models) in zip(row[0], panels.items(), strict=True):
        for name, shares in models.items():
            points = [(n, 100 * x) for n, x in zip(lengths, shares, strict=True) if x is not None]
            style = line_style(names.index(name))
            if points:
                axes.plot(*zip(*points, strict=True), **style, marker="o", label=name)
        axes.axvline(trained, color="0.7", lw=1, ls="--")
        _length_axis(axes, lengths)
        axes.set(title=title, ylim=(-3, 103))
    row[0][0].set_ylabel("whole sequences right, %")
    shown = [
        pair for axes in row[0] for pair in zip(*axes.get_legend_handles_labels(), strict=True)
    ]
    lines = {label: handle for handle, label in shown}  # one entry per model over all panels
    figure.legend(
        [*lines.values()], [*lines], loc="outside right center", frameon=False, fontsize=8
    )
    return figure


def plot_fewest_blocks(
    lengths: Sequence[int], models: Mapping[str, Sequence[int | None]], deepest: int
) -> Figure:
    """Plot the smallest number of blocks that solves a length (``fig:a5-min-layers``).

    Args:
        lengths: lengths of the test sequences.
        models: maps a model to the smallest number of blocks for each length; None if no tried
            number solves it.
        deepest: largest number of blocks tried; unsolved lengths are drawn above it.

    Returns:
        The figure, with one line per model.
    """
    figure, axes = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    for i, (name, fewest) in enumerate(models.items()):
        shift = 0.03 * (i - len(models) / 2)  # lines that coincide stay visible
        blocks = [(deepest + 1 if n is None else n) + shift for n in fewest]
        axes.plot(list(lengths), blocks, **line_style(i), marker="o", label=name)
    _length_axis(axes, lengths)
    ticks = [*range(1, deepest + 2)]
    axes.set_yticks(ticks, [*(str(n) for n in ticks[:-1]), f"> {deepest}"])
    axes.set_ylabel("fewest blocks with 90 % right")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _length_axis(axes: Any, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lengths), [f"{n:,}" for n in lengths])
    axes.set_xlabel("length")
    axes.grid(alpha=0.3)
