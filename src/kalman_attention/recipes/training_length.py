"""``training-length``: the ranking on MAD, without encoder and decoder, after more updates.

Not in the paper: it shows whether a ranking at a reduced scale changes when training continues.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kalman_attention._tables import Table, percent
from kalman_attention.recipes import mad
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, notes
from kalman_attention.recipes.task_run import TaskRun

RATES = {
    "compression": {"gated_deltanet": 3e-3, "kla": 1e-3},
    "fuzzy_recall": {"mlstm": 1e-3, "kla": 3e-3},
    "selective_copying": {"gated_deltanet": 3e-3, "kla": 3e-3},
}
"""KLA and the best model of ``mad-bare`` at scale ``cpu``, each with its better rate there."""

TIMES: dict[Scale, int] = {"smoke": 3, "cpu": 3, "paper": 1}
"""Epochs as a multiple of those of ``mad-bare``; the published number is long enough."""


def cells(scale: Scale) -> list[Cell]:
    """Some runs of ``mad-bare``, trained longer."""
    grid, runs = mad.BARE[scale].rates, mad.cells(scale, "mad-bare")
    return [_longer(cell, TIMES[scale]) for cell in runs if _chosen(cell, grid)]


def _chosen(cell: Cell, grid: Sequence[float]) -> bool:
    rate = RATES.get(cell.labels["task"], {}).get(cell.labels["model"])
    return rate is not None and (len(grid) == 1 or cell.labels["lr"] == f"lr{rate:g}")


def _longer(cell: Cell, times: int) -> Cell:
    if times == 1:
        return cell
    run = cell.run
    assert isinstance(run, TaskRun)
    assert run.training.epochs is not None
    training = dataclasses.replace(run.training, epochs=times * run.training.epochs)
    run = dataclasses.replace(run, training=training)
    return Cell(experiment="training-length", labels=cell.labels, run=run)


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Best accuracy up to a third, two thirds and the end of training, and the last accuracy."""
    below = [f"tasks and models as in mad-bare at scale {scale}", _epochs(scale)]
    if len(mad.BARE[scale].rates) > 1:
        below.append("each model with its better learning rate in mad-bare")
    rows = []
    for cell in cells(scale):
        if cell.labels["seed"] == "seed0":
            task, model, lr = (cell.labels[name] for name in ("task", "model", "lr"))
            told = [task.replace("_", " "), model, lr.removeprefix("lr")]
            rows.append([*told, *_accuracies(cell, results)])
    header = ["task", "model", "rate", "1/3", "2/3", "all", "last"]
    title = "MAD over training length, best macro accuracy so far, %"
    return [Table(title, header, rows, notes(scale, below))]


def _accuracies(cell: Cell, results: Sequence[dict[str, Any]]) -> list[str]:
    """Means over seeds, at each third and at the last evaluation."""
    own = {name: value for name, value in cell.labels.items() if name != "seed"}
    curves = [r["curve"] for r in results if own.items() <= r["labels"].items()]
    if not curves:
        return ["-"] * 4
    thirds = [[_best(c, cell.run.updates * n / 3) for c in curves] for n in (1, 2, 3)]
    last = [float(curve[-1]["accuracy"]) for curve in curves]
    return [percent(sum(values) / len(values)) for values in (*thirds, last)]


def _best(curve: Sequence[dict[str, Any]], until: float) -> float:
    return max(float(point["accuracy"]) for point in curve if point["step"] <= until)


def _epochs(scale: Scale) -> str:
    tasks = mad.BARE[scale].tasks
    named = [f"{TIMES[scale] * tasks[t].epochs} ({t.replace('_', ' ')})" for t in RATES]
    return f"at most {', '.join(named)} epochs"


EXPERIMENT = Experiment(
    name="training-length",
    source="tab:accuracy-heatmap",
    cells=cells,
    tables=tables,
)
