"""Benchmarks: time as a function of sequence length and of context length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kalman_attention.plots.common import line_style, save_figure


def draw_scaling(folder: Path, sweep: Mapping[str, Any], name: str) -> list[Path]:
    """Draw the paper's scaling figures: time over sequence length, on logarithmic axes.

    Args:
        folder: folder for the figures.
        sweep: the entry ``sweep`` of the results of ``kla bench scan`` or ``kla bench mixers``.
        name: how the names of the files begin.

    Returns:
        The paths of the PNGs, one for each pass; the SVGs have the same names.
    """
    paths = []
    for kind, rows in sweep["passes"].items():
        path = folder / f"{name}_{kind.replace(' + ', '_')}.png"
        save_figure(_plot_scaling(rows, title=f"{kind}, {sweep['shape']}"), path)
        paths.append(path)
    return paths


def _plot_scaling(rows: Mapping[str, Any], title: str) -> Figure:
    """One line per implementation; a cross marks where one gave up."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for i, (engine, row) in enumerate(rows.items()):
        points = sorted((int(T), seconds) for T, seconds in row["seconds"].items())
        if not points:
            continue
        lengths, seconds = zip(*points, strict=True)
        milliseconds = [1e3 * s for s in seconds]
        style = line_style(i)
        axes.loglog(lengths, milliseconds, **style, marker="o", base=2, label=engine)
        if row["gave_up"]:
            last = (lengths[-1], milliseconds[-1])
            axes.loglog(*last, "x", color=style["color"], ms=12, mew=2)
            note = "memory" if "memory" in row["gave_up"] else "time"
            label = f"gives up: {note}"
            axes.annotate(label, last, xytext=(6, 4), textcoords="offset points", fontsize=8)
    axes.set_yscale("log", base=10)
    axes.set(xlabel="sequence length T", ylabel="milliseconds", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    return figure


def plot_decode_speed(
    contexts: Sequence[int], milliseconds: Mapping[str, Sequence[float]]
) -> Figure:
    """Plot the time per decoded token over the context length, one line per model.

    Args:
        contexts: context lengths; their axis is logarithmic.
        milliseconds: maps a model to its time per token at each of them.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axis = figure.subplots()
    for i, (name, times) in enumerate(milliseconds.items()):
        axis.plot(contexts, times, **line_style(i), marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axis.set_ylim(bottom=0.0)
    axis.set_xlabel("context (tokens)")
    axis.set_ylabel("time per token (ms)")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure
