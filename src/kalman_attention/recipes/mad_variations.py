"""``mad-variations``: some runs of ``mad`` with more epochs or other embeddings.

Not in the paper, whose figures come from up to 750 epochs. It shows how far a result of ``mad``
depends on what ``mad`` saves at the ``cpu`` scale, and on what the paper leaves open.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kalman_attention._tables import Table, percent
from kalman_attention.published import MAD, MAD_TASKS
from kalman_attention.recipes import mad
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, mean_of_best, notes
from kalman_attention.recipes.task_run import TaskRun

Models = Mapping[str, Sequence[str]]
"""The models of each task."""

_LONGER = {"fuzzy_recall": ("mamba", "kla"), "selective_copying": ("gated_deltanet", "kla")}
_SMALLER = {"selective_copying": ("gated_deltanet", "kla")}


@dataclass(frozen=True, kw_only=True)
class Variation:
    """One column of the table.

    Attributes:
        models: the runs that are varied.
        change: the varied run, given that of ``mad``.
    """

    models: Models
    change: Callable[[TaskRun], TaskRun]


def _longer(run: TaskRun) -> TaskRun:
    assert run.training.epochs is not None
    training = dataclasses.replace(run.training, epochs=3 * run.training.epochs)
    return dataclasses.replace(run, training=training)


def _smaller_embeddings(run: TaskRun) -> TaskRun:
    """Embeddings that do not hide what a mixer without a norm of its read-out adds to them."""
    return dataclasses.replace(run, model=dataclasses.replace(run.model, embedding_std=0.3))


VARIATIONS = {
    "3 x epochs": Variation(models=_LONGER, change=_longer),
    "embeddings 0.3": Variation(models=_SMALLER, change=_smaller_embeddings),
}
"""What is varied, one thing at a time, by its column in the table."""


def cells(scale: Scale) -> list[Cell]:
    """Some runs of ``mad``, and each of them again with every variation."""
    varied = [
        _varied(cell, name, variation)
        for name, variation in _variations(scale).items()
        for cell in mad.chosen_cells(scale, variation.models)
    ]
    return mad.chosen_cells(scale, _all_models()) + varied


def _variations(scale: Scale) -> Mapping[str, Variation]:
    """None at the ``paper`` scale, where ``mad`` itself has epochs enough."""
    return VARIATIONS if scale != "paper" else {}


def _all_models() -> dict[str, list[str]]:
    """Every model that is varied, by task."""
    asked = {t: {m for v in VARIATIONS.values() for m in v.models.get(t, ())} for t in MAD_TASKS}
    return {task: [m for m in mad.MODELS if m in asked[task]] for task in MAD_TASKS}


def _varied(cell: Cell, name: str, variation: Variation) -> Cell:
    run = cell.run
    assert isinstance(run, TaskRun)
    return Cell(
        experiment="mad-variations",
        labels={"model": cell.labels["model"], "task": cell.labels["task"], "change": name},
        run=variation.change(run),
    )


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Accuracy in ``mad`` with its first seed, and with each variation."""
    first = [r for r in results if "change" not in r["labels"]]
    columns = _variations(scale)

    def row(task: str, model: str) -> list[str]:
        as_in_mad = percent(mean_of_best(first, model=model, task=task), MAD[model][task])
        varied = [
            percent(mean_of_best(results, model=model, task=task, change=name))
            if model in variation.models.get(task, ())
            else ""
            for name, variation in columns.items()
        ]
        return [task.replace("_", " "), model, as_in_mad, *varied]

    rows = [row(task, model) for task, models in _all_models().items() for model in models]
    below = notes(
        scale,
        ["otherwise as mad with its first seed, each model at the learning rate chosen there"],
    )
    title = "MAD, varied, macro accuracy, % (paper)"
    return [Table(title, ["task", "model", "mad", *columns], rows, below)]


EXPERIMENT = Experiment(
    name="mad-variations",
    source="tab:accuracy-heatmap",
    cells=cells,
    tables=tables,
)
