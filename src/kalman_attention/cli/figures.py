"""The figures of ``kla reproduce``, from results and from trained models; PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kalman_attention.cli.bench import scan
from kalman_attention.cli.verbs.bench import LENGTHS
from kalman_attention.recipes import demo, inspection
from kalman_attention.recipes import state_tracking as tracking
from kalman_attention.recipes.cell import Cell, Results
from kalman_attention.recipes.experiment import Experiment, Scale
from kalman_attention.recipes.series import CHOSEN, SeriesRun

_MAP_TASKS = ("selective_copying", "recall", "memorization")


def curves(experiment: Experiment, results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Learning curves of every cell that is there: panels by task or setting, lines by model."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for result in results:
        line, *rest = [v for k, v in result["labels"].items() if k != "seed"]
        panel, *rest = rest or [experiment.name]
        known = [p for p in result["curve"] if experiment.metric in p]
        points = [(float(p["step"]), float(p[experiment.metric])) for p in known]
        if points:  # a fit in one step has no curve, another task of a recipe another metric
            panels.setdefault(panel, {})[" ".join([line, *rest])] = points
    if not panels:
        return []
    try:
        from kalman_attention.plots.files import save_figure
        from kalman_attention.plots.learning_curves import plot_learning_curves
    except ModuleNotFoundError:
        return []
    figure = plot_learning_curves(panels, ylabel=experiment.metric.replace("_", " "))
    return save_figure(figure, folder / "learning_curves.png")


def state_tracking(results: Sequence[dict[str, Any]], scale: Scale, folder: Path) -> list[Path]:
    """Accuracy over length, and fewest blocks over length (beside ``fig:a5-min-layers``)."""
    setting = tracking.SCALES[scale]
    lengths, depth = setting.test_lens, min(setting.depths)
    panels = {
        f"{task}, one block": {
            name: [tracking.median(results, name, task, depth, length) for length in lengths]
            for name in setting.models
        }
        for task in setting.tasks
        if any(result["labels"]["task"] == task for result in results)
    }
    paths = _over_length(lengths, panels, setting.seq_len, folder)
    if not paths:
        return []
    from kalman_attention.plots.files import save_figure
    from kalman_attention.plots.state_tracking import plot_fewest_blocks

    task = "a5" if "a5" in setting.tasks else setting.tasks[0]
    found = {
        name: [tracking.fewest_blocks(results, setting, name, task, length) for length in lengths]
        for name in setting.models
    }
    # More blocks than were tried may solve a length: nothing is said before all depths are there.
    fewest = {
        name: blocks
        for name, blocks in found.items()
        if None not in blocks
        or all(tracking.accuracies(results, name, task, n) for n in setting.depths)
    }
    if not fewest:
        return paths
    blocks = plot_fewest_blocks(lengths, fewest, max(setting.depths))
    return paths + save_figure(blocks, folder / "fewest_blocks.png")


def series(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Bands of the chosen models over the first hidden set, where the data is at hand."""
    try:
        from kalman_attention.plots.files import save_figure
        from kalman_attention.plots.series import plot_bands
    except ModuleNotFoundError:
        return []
    paths: list[Path] = []
    for cell in cells:
        run = cell.run
        if not isinstance(run, SeriesRun) or run.model != CHOSEN[run.series] or run.seed:
            continue
        times, values, hidden, low, mean, high = run.bands()
        if run.series == "car":  # bands of metres around a way of hundreds are thinner than a line
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


def demo_lengths(results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Accuracy over length of the models that ``kla demo`` has trained to track states."""
    setting = demo.TRACKING
    lines = {
        result["labels"]["model"]: [x["accuracy"] for x in result["lengths"].values()]
        for result in results
        if result["lengths"]
    }
    return _over_length(setting.test_lens, {"A5, one block": lines}, setting.seq_len, folder)


def _over_length(
    lengths: Sequence[int],
    panels: dict[str, dict[str, list[float | None]]] | dict[str, dict[str, list[float]]],
    trained: int,
    folder: Path,
) -> list[Path]:
    try:
        from kalman_attention.plots.files import save_figure
        from kalman_attention.plots.state_tracking import plot_accuracy_over_length
    except ModuleNotFoundError:
        return []
    if not panels:
        return []
    figure = plot_accuracy_over_length(lengths, panels, trained)
    return save_figure(figure, folder / "accuracy_over_length.png")


def variance(results: Results, scale: Scale) -> list[Path]:
    """Posterior variance over a selective-copying sequence (``fig:posterior-var-sc``)."""
    trained = inspection.trained_kla(results, scale, "selective_copying")
    return variance_of(trained, results.folder("variance"))


def variance_of(trained: inspection.Trained, folder: Path) -> list[Path]:
    """Posterior variance of a model over one sequence, tokens to copy marked."""
    from kalman_attention.plots.files import save_figure
    from kalman_attention.plots.posterior_variance import plot_posterior_variance

    trace = inspection.variance_trace(trained)
    figure = plot_posterior_variance(trace.variance, trace.gain, trace.tokens, marked=trace.marked)
    return save_figure(figure, folder / "variance.png")


def attention_maps(results: Results, scale: Scale) -> list[Path]:
    """Kalman attention maps of three tasks (``sec:attention-viz``)."""
    from kalman_attention.plots.attention_maps import plot_attention_maps
    from kalman_attention.plots.files import save_figure

    paths: list[Path] = []
    for task in _MAP_TASKS:
        trained = inspection.trained_kla(results, scale, task)
        sample = inspection.sample_maps(trained)
        titles = [f"channel {channel}" for channel in sample]
        figure = plot_attention_maps(torch.stack([*sample.values()]), titles, trained.tokens)
        paths += save_figure(figure, results.folder("attention-maps") / f"{task}.png")
    return paths


def scaling(results: Results, scale: Scale) -> list[Path]:
    """Time over sequence length, one line per implementation (``fig:scaling``)."""
    folder = results.folder("scaling")
    lengths = [128, 256] if scale == "smoke" else LENGTHS
    scan.bench_scan(only="sweep", lengths=lengths, out=folder)
    return sorted(folder.glob("*.png"))
