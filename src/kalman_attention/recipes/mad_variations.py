"""``mad-variations``: some runs of ``mad`` with other seeds, and trained longer.

Not in the paper, whose figures are means over five seeds after up to 750 epochs. It shows whether
a ranking of ``mad`` survives what ``mad`` saves at the ``cpu`` scale.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from kalman_attention._tables import Table, percent
from kalman_attention.published import MAD, MAD_TASKS
from kalman_attention.recipes import mad
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, mean_of_best, notes
from kalman_attention.recipes.task_run import TaskRun
from kalman_attention.train.config import TrainConfig

Models = Mapping[str, Sequence[str]]
"""The models of each task."""

_REPEATED = {
    "compression": ("gated_deltanet", "kla"),
    "fuzzy_recall": ("gated_deltanet", "mamba", "mlstm", "kla"),
    "selective_copying": ("gated_deltanet", "kla"),
}
_LONGER = {"fuzzy_recall": ("mamba", "kla"), "selective_copying": ("gated_deltanet", "kla")}


@dataclass(frozen=True, kw_only=True)
class Variation:
    """What differs from the run of ``mad``.

    Attributes:
        models: the runs that are varied.
        training: the fields of the training options that differ, given those of ``mad``.
    """

    models: Models
    training: Callable[[TrainConfig], dict[str, Any]]


def _longer(training: TrainConfig) -> dict[str, Any]:
    assert training.epochs is not None
    return {"epochs": 3 * training.epochs}


SEEDS = {
    "seed 1": Variation(models=_REPEATED, training=lambda _: {"seed": 1}),
    "seed 2": Variation(models=_REPEATED, training=lambda _: {"seed": 2}),
}
"""Repetitions of KLA and the best baselines."""

VARIATIONS = SEEDS | {"3 x epochs": Variation(models=_LONGER, training=_longer)}
"""What is varied, one thing at a time, by its column in the table."""


def cells(scale: Scale) -> list[Cell]:
    """Some runs of ``mad``, and each of them again with every variation.

    At the ``paper`` scale there are none of the latter: ``mad`` has seeds and epochs enough.
    """
    varied = [
        _varied(cell, name, variation)
        for name, variation in (VARIATIONS if scale != "paper" else {}).items()
        for cell in mad.chosen_cells(scale, variation.models)
    ]
    return mad.chosen_cells(scale, _all_models()) + varied


def _all_models() -> dict[str, list[str]]:
    """Every model that is varied, by task."""
    asked = {t: {m for v in VARIATIONS.values() for m in v.models.get(t, ())} for t in MAD_TASKS}
    return {task: [m for m in mad.MODELS if m in asked[task]] for task in MAD_TASKS}


def _varied(cell: Cell, name: str, variation: Variation) -> Cell:
    run = cell.run
    assert isinstance(run, TaskRun)
    training = dataclasses.replace(run.training, **variation.training(run.training))
    return Cell(
        experiment="mad-variations",
        labels={"model": cell.labels["model"], "task": cell.labels["task"], "change": name},
        run=dataclasses.replace(run, training=training),
    )


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Accuracy in ``mad``, with every seed, their mean, and after longer training."""
    first = [r for r in results if "change" not in r["labels"]]
    columns = [*SEEDS, "mean", *(name for name in VARIATIONS if name not in SEEDS)]

    def row(task: str, model: str) -> list[str]:
        asked = [name for name, v in VARIATIONS.items() if model in v.models.get(task, ())]
        found = {x: mean_of_best(results, model=model, task=task, change=x) for x in asked}
        as_in_mad = mean_of_best(first, model=model, task=task)
        repeated = [as_in_mad, *(found[x] for x in SEEDS if x in found)]
        known = [x for x in repeated if x is not None]
        shown = {x: percent(accuracy) for x, accuracy in found.items()}
        if len(repeated) > 1:
            shown["mean"] = percent(mean(known) if len(known) == len(repeated) else None)
        told = [task.replace("_", " "), model, percent(as_in_mad, MAD[model][task])]
        return [*told, *(shown.get(x, "") for x in columns)]

    rows = [row(task, model) for task, models in _all_models().items() for model in models]
    below = notes(scale, ["otherwise as mad, each model at the learning rate chosen there"])
    title = "MAD, varied, macro accuracy, % (paper)"
    return [Table(title, ["task", "model", "mad", *columns], rows, below)]


EXPERIMENT = Experiment(
    name="mad-variations",
    source="tab:accuracy-heatmap",
    cells=cells,
    tables=tables,
)
