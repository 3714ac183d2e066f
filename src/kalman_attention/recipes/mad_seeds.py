"""``mad-seeds``: KLA and the best baseline on some tasks of ``mad``, with more seeds.

Not in the paper, whose figures are means over five seeds: it shows whether the differences between
the models of ``mad``, which has one seed at the ``cpu`` scale, are larger than those between seeds.
"""

import dataclasses
from collections.abc import Sequence
from statistics import mean
from typing import Any

from kalman_attention._tables import Table, percent
from kalman_attention.published import MAD
from kalman_attention.recipes import mad
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, best, notes
from kalman_attention.recipes.task_run import TaskRun

CHOSEN = {
    "compression": ("gated_deltanet", "kla"),
    "fuzzy_recall": ("mamba", "kla"),
}
"""KLA and the best baseline, on the tasks whose runs are short enough to be repeated."""

SEEDS: dict[Scale, tuple[int, ...]] = {"smoke": (1,), "cpu": (1, 2), "paper": ()}
"""Seeds besides those of ``mad``; at the ``paper`` scale it has enough."""


def cells(scale: Scale) -> list[Cell]:
    """Some runs of ``mad`` at its first learning rate, and each of them again with other seeds."""
    first = mad.first_rate(scale, CHOSEN)
    return [*first, *(_again(cell, seed) for seed in SEEDS[scale] for cell in first)]


def _again(cell: Cell, seed: int) -> Cell:
    run = cell.run
    assert isinstance(run, TaskRun)
    return Cell(
        experiment="mad-seeds",
        labels={**cell.labels, "seed": f"seed{seed}"},
        run=dataclasses.replace(run, training=dataclasses.replace(run.training, seed=seed)),
    )


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Accuracy with every seed and their mean, with the paper's mean in brackets."""
    seeds = [f"seed{seed}" for seed in (*mad.SCALES[scale].seeds, *SEEDS[scale])]
    rows = []
    for task, models in CHOSEN.items():
        for model in models:
            found = [best(results, model=model, task=task, seed=seed) for seed in seeds]
            values = [r["metrics"]["accuracy"] if r else None for r in found]
            known = [value for value in values if value is not None]
            average = mean(known) if len(known) == len(seeds) else None
            shown = [*map(percent, values), percent(average, MAD[model][task])]
            rows.append([task.replace("_", " "), model, *shown])
    header = ["task", "model", *(seed.replace("seed", "seed ") for seed in seeds), "mean"]
    title = "MAD with several seeds, macro accuracy, % (paper)"
    return [Table(title, header, rows, notes(scale, ["otherwise as mad, at its first rate"]))]


EXPERIMENT = Experiment(
    name="mad-seeds",
    source="tab:accuracy-heatmap",
    cells=cells,
    tables=tables,
)
