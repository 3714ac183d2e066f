"""``mad-variations``: some runs of ``mad`` with more epochs or other embeddings.

Not in the paper, whose figures come from up to 750 epochs. It shows how far a result of ``mad``
depends on what ``mad`` saves at the ``cpu`` scale, and on what the paper leaves open.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from kalman_attention._tables import Table, percent
from kalman_attention.recipes import mad, mad_scales
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, notes
from kalman_attention.recipes.task_run import TaskRun

_LONGER = {"fuzzy_recall": ("mamba", "kla"), "selective_copying": ("gated_deltanet", "kla")}
_LONGER_AGAIN = {"selective_copying": ("kla",)}  # the paper has 90.7 % there
_SMALLER = {"selective_copying": ("gated_deltanet", "kla")}


@dataclass(frozen=True, kw_only=True)
class Variation:
    """One column of the table.

    Attributes:
        models: the models of each task whose run with the first seed is varied.
        repeated: those whose runs with further seeds are varied too.
        change: the varied run, given that of ``mad``.
    """

    models: Mapping[str, Sequence[str]]
    repeated: Mapping[str, Sequence[str]] = field(default_factory=dict)
    change: Callable[[TaskRun], TaskRun]

    def originals(self, scale: Scale) -> list[Cell]:
        """The runs of ``mad`` that are varied."""
        more = mad.chosen_cells(scale, self.repeated, mad_scales.SCALES[scale].more_seeds)
        return mad.chosen_cells(scale, self.models) + more


def _longer(run: TaskRun) -> TaskRun:
    assert run.training.epochs is not None
    training = dataclasses.replace(run.training, epochs=3 * run.training.epochs)
    return dataclasses.replace(run, training=training)


def _smaller_embeddings(run: TaskRun) -> TaskRun:
    """Embeddings that do not hide what a mixer without a norm of its read-out adds to them."""
    return dataclasses.replace(run, model=dataclasses.replace(run.model, embedding_std=0.3))


VARIATIONS = {
    "3 x epochs": Variation(models=_LONGER, repeated=_LONGER_AGAIN, change=_longer),
    "embeddings 0.3": Variation(models=_SMALLER, change=_smaller_embeddings),
}
"""What is varied, one thing at a time, by its column in the table."""


def cells(scale: Scale) -> list[Cell]:
    """Some runs of ``mad``, and each of them again with every variation."""
    original = [cell for v in VARIATIONS.values() for cell in v.originals(scale)]
    varied = [
        _varied(cell, name, variation)
        for name, variation in _variations(scale).items()
        for cell in variation.originals(scale)
    ]
    return [cell for cell in mad.cells(scale) if cell in original] + varied


def _variations(scale: Scale) -> Mapping[str, Variation]:
    """None at the ``paper`` scale, where ``mad`` itself has epochs enough."""
    return VARIATIONS if scale != "paper" else {}


def _varied(cell: Cell, name: str, variation: Variation) -> Cell:
    run = cell.run
    assert isinstance(run, TaskRun)
    labels = {label: cell.labels[label] for label in ("model", "task")}
    return Cell(
        experiment="mad-variations",
        labels={**labels, "change": name, "seed": cell.labels["seed"]},
        run=variation.change(run),
    )


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Accuracy in ``mad`` and with each variation, by seed and on average."""
    columns = ["mad", *_variations(scale)]
    asked = [_place(cell.labels) for cell in cells(scale)]
    found = {_place(r["labels"]): r["metrics"]["accuracy"] for r in results}

    def line(task: str, model: str, seeds: Sequence[str]) -> list[str]:
        name = seeds[0].removeprefix("seed") if len(seeds) == 1 else "mean"
        shown = []
        for column in columns:
            places = [(task, model, seed, column) for seed in seeds]
            known = [found[place] for place in places if place in found]
            accuracy = mean(known) if len(known) == len(seeds) else None
            shown.append(percent(accuracy) if {*places} <= {*asked} else "")
        return [task.replace("_", " "), model, name, *shown]

    rows = []
    for task, model in dict.fromkeys((task, model) for task, model, *_ in asked):
        seeds = sorted({seed for *row, seed, _ in asked if row == [task, model]})
        rows += [line(task, model, [seed]) for seed in seeds]
        rows += [line(task, model, seeds)] if len(seeds) > 1 else []
    below = notes(scale, ["otherwise as mad, each model at the learning rate chosen there"])
    header = ["task", "model", "seed", *columns]
    return [Table("MAD, varied, macro accuracy, %", header, rows, below)]


def _place(labels: Mapping[str, str]) -> tuple[str, str, str, str]:
    """Where a result belongs: task, model, seed and column."""
    return labels["task"], labels["model"], labels["seed"], labels.get("change", "mad")


EXPERIMENT = Experiment(
    name="mad-variations",
    source="tab:accuracy-heatmap",
    cells=cells,
    tables=tables,
)
