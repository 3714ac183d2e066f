"""The figures of ``kla reproduce``, from results and from trained models; PNG and SVG."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kalman_attention.cli.bench import scan
from kalman_attention.cli.verbs.bench import LENGTHS
from kalman_attention.recipes import inspection
from kalman_attention.recipes.cell import Results
from kalman_attention.recipes.experiment import Experiment, Scale

_MAP_TASKS = ("selective_copying", "recall", "memorization")


def curves(experiment: Experiment, results: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Learning curves of every cell that is there: panels by task or setting, lines by model."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for result in results:
        line, *rest = [v for k, v in result["labels"].items() if k != "seed"]
        panel, *rest = rest or [experiment.name]
        points = [(float(p["step"]), float(p[experiment.metric])) for p in result["curve"]]
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
