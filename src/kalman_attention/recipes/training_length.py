"""``training-length``: some runs of ``mad``, trained longer.

Not in the paper: it shows what a reduced number of epochs costs, and whether it changes a ranking.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kalman_attention._tables import Table, percent
from kalman_attention.published import MAD
from kalman_attention.recipes import mad
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, mean_of_best, notes
from kalman_attention.recipes.task_run import TaskRun

CHOSEN = {
    "compression": ("gated_deltanet", "kla"),
    "fuzzy_recall": ("mamba", "kla"),
    "selective_copying": ("gated_deltanet", "kla"),
}
"""KLA and a strong baseline, on the tasks that no model of the paper solves."""

TIMES: dict[Scale, int] = {"smoke": 3, "cpu": 3, "paper": 1}
"""Epochs as a multiple of those of ``mad``; the published number is long enough."""


def cells(scale: Scale) -> list[Cell]:
    """Some runs of ``mad`` at its first learning rate, and each of them again, trained longer."""
    short = mad.first_rate(scale, CHOSEN)
    times = TIMES[scale]
    return [*short, *(_longer(cell, times) for cell in short if times > 1)]


def _longer(cell: Cell, times: int) -> Cell:
    run = cell.run
    assert isinstance(run, TaskRun)
    assert run.training.epochs is not None
    training = dataclasses.replace(run.training, epochs=times * run.training.epochs)
    labels = {**cell.labels, "epochs": f"{training.epochs} epochs"}
    longer = dataclasses.replace(run, training=training)
    return Cell(experiment="training-length", labels=labels, run=longer)


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Accuracy with the epochs of ``mad`` and with more of them; the paper's in brackets."""
    short = [r for r in results if "epochs" not in r["labels"]]
    long = [r for r in results if "epochs" in r["labels"]]
    rows = []
    for task, models in CHOSEN.items():
        epochs, theirs = mad.SCALES[scale].tasks[task].epochs, MAD
        for model in models:
            found = (mean_of_best(part, model=model, task=task) for part in (short, long))
            shown = [percent(accuracy, theirs[model][task]) for accuracy in found]
            told = [task.replace("_", " "), model, str(epochs)]
            rows.append([*told, shown[0], str(TIMES[scale] * epochs), shown[1]])
    header = ["task", "model", "epochs", "accuracy", "epochs", "accuracy"]
    title = "MAD, trained longer, macro accuracy, % (paper)"
    return [Table(title, header, rows, notes(scale, ["otherwise as mad, at its first rate"]))]


EXPERIMENT = Experiment(
    name="training-length",
    source="tab:accuracy-heatmap",
    cells=cells,
    tables=tables,
)
