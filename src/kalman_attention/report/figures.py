"""The figures of ``kla reproduce`` as files, from results and from trained models; PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kalman_attention.recipes import inspection
from kalman_attention.recipes import state_tracking as tracking
from kalman_attention.recipes.cell import Cell, Results
from kalman_attention.recipes.experiment import Experiment, Scale
from kalman_attention.recipes.series import CHOSEN, SeriesRun
from kalman_attention.report.curves import fewest_blocks, learning_curves, over_length

_MAP_TASKS = ("selective_copying", "recall", "memorization")


def curves(experiment: Experiment, results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Learning curves of every finished cell."""
    panels = learning_curves(experiment, results)
    if not panels:
        return []
    try:
        from kalman_attention.plots.common import save_figure
        from kalman_attention.plots.training import plot_learning_curves
    except ModuleNotFoundError:
        return []
    figure = plot_learning_curves(panels, ylabel=experiment.metric.replace("_", " "))
    return save_figure(figure, folder / "learning_curves.png")


def state_tracking(results: Sequence[dict[str, Any]], scale: Scale, folder: Path) -> list[Path]:
    """Accuracy over length, and fewest blocks over length (as in ``fig:a5-min-layers``)."""
    setting = tracking.SCALES[scale]
    panels = over_length(results, scale, min(setting.depths))
    if not panels:
        return []
    try:
        from kalman_attention.plots.common import save_figure
        from kalman_attention.plots.training import (
            plot_accuracy_over_length,
            plot_fewest_blocks,
        )
    except ModuleNotFoundError:
        return []
    titled = {f"{task}, one block": models for task, models in panels.items()}
    figure = plot_accuracy_over_length(setting.test_lens, titled, setting.seq_len)
    paths = save_figure(figure, folder / "accuracy_over_length.png")
    fewest = fewest_blocks(results, scale)
    if fewest is None:
        return paths
    blocks = plot_fewest_blocks(setting.test_lens, fewest, max(setting.depths))
    return paths + save_figure(blocks, folder / "fewest_blocks.png")


def series(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Bands of the chosen models on the first hidden set, if the data is available."""
    try:
        from kalman_attention.plots.beliefs import plot_bands
        from kalman_attention.plots.common import save_figure
    except ModuleNotFoundError:
        return []
    paths: list[Path] = []
    for cell in cells:
        run = cell.run
        if not isinstance(run, SeriesRun) or run.model != CHOSEN[run.series] or run.seed:
            continue
        times, values, hidden, low, mean, high = run.bands()
        if (
            run.series == "car"
        ):  # bands of metres are thinner than a line in a plot of hundreds of metres
            values, low, high, mean = (x - mean for x in (values, low, high, mean))
        figure = plot_bands(
            times[~hidden],
            values[~hidden],
            [(times, mean, low, high)],
            hidden=(times[hidden], values[hidden]) if hidden.any() else None,
            ylabel="m from the mean" if run.series == "car" else "",
        )
        paths += save_figure(figure, folder / f"{run.series}.png")
    return paths


def variance(results: Results, scale: Scale) -> list[Path]:
    """Posterior variance over a selective-copying sequence (``fig:posterior-var-sc``)."""
    from kalman_attention.plots.beliefs import plot_posterior_variance
    from kalman_attention.plots.common import save_figure

    trace = inspection.variance_trace(inspection.trained_kla(results, scale, "selective_copying"))
    figure = plot_posterior_variance(trace.variance, trace.gain, trace.tokens, marked=trace.marked)
    return save_figure(figure, results.folder("variance") / "variance.png")


def attention_maps(results: Results, scale: Scale) -> list[Path]:
    """Kalman attention maps of three tasks (``sec:attention-viz``)."""
    from kalman_attention.plots.beliefs import plot_attention_maps
    from kalman_attention.plots.common import save_figure

    paths: list[Path] = []
    for task in _MAP_TASKS:
        trained = inspection.trained_kla(results, scale, task)
        sample = inspection.sample_maps(trained)
        titles = [f"channel {channel}" for channel in sample]
        figure = plot_attention_maps(torch.stack([*sample.values()]), titles, trained.tokens)
        paths += save_figure(figure, results.folder("attention-maps") / f"{task}.png")
    return paths
