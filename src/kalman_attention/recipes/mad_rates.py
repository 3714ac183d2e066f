"""``mad-rates``: the choice of each model's learning rate on selective copying in ``mad``.

A run of ``mad`` on selective copying takes hours, so each model has a single run there, twice as
long as two runs would be. Its rate is chosen here, with shorter sequences, fewer epochs and a
different seed, in the same way for every model.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kalman_attention._tables import Table, percent
from kalman_attention.recipes import mad
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, best, notes
from kalman_attention.tasks.registry import make_task

TASK = "selective_copying"
SEED = 1
RATES = (3e-3, 1e-3)

_SHORT = mad.TaskScale(options={"seq_len": 64, "num_copied": 8}, epochs=12)


def _suite(scale: Scale) -> mad.MadScale:
    """``mad`` at a scale, with the short task if it has no selective copying."""
    suite = mad.SCALES[scale]
    task = suite.tasks[TASK] if scale == "smoke" else _SHORT
    cpu = mad.SCALES["cpu"]
    return dataclasses.replace(
        suite, tasks={TASK: task}, schedule=cpu.schedule, validation_size=cpu.validation_size
    )


def cells(scale: Scale) -> list[Cell]:
    """Every model at every rate."""
    suite = _suite(scale)
    vocabulary = make_task(TASK, **suite.tasks[TASK].options).vocab_size
    found = []
    for row in mad.MODELS:
        model = mad.model_config(row.removesuffix("+"), vocabulary)
        for rate in RATES:
            labels = {"model": row, "task": TASK, "lr": f"lr{rate:g}", "seed": f"seed{SEED}"}
            run = mad.task_run(model, TASK, suite, rate=rate, seed=SEED, marginal=row.endswith("+"))
            found.append(Cell(experiment="mad-rates", labels=labels, run=run))
    return found


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Validation accuracy of every model at every rate."""

    def accuracy(model: str, rate: float) -> str:
        found = best(results, model=model, lr=f"lr{rate:g}")
        return percent(None if found is None else found["validation"]["accuracy"])

    rows = [[model, *(accuracy(model, rate) for rate in RATES)] for model in mad.MODELS]
    task = _suite(scale).tasks[TASK]
    below = notes(
        scale,
        (
            f"{task.options['seq_len']} tokens with {task.options['num_copied']} to copy, "
            f"{task.epochs} epochs, seed {SEED}; otherwise as in mad at scale cpu",
            "on the validation set; mad uses the better rate on selective copying",
        ),
    )
    title = "Selective copying, short: validation accuracy by learning rate, %"
    return [Table(title, ["model", *(f"{rate:g}" for rate in RATES)], rows, below)]


EXPERIMENT = Experiment(
    name="mad-rates",
    source="tab:accuracy-heatmap",
    cells=cells,
    tables=tables,
)
