"""``mad-rates``: the choice of each model's learning rate on the longest tasks of ``mad``.

Compression, fuzzy recall and selective copying take hours in ``mad``, so each model has a single
run there, twice as long as two runs would be. Its rate is chosen here, with fewer epochs and a
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

EPOCHS = {"compression": 10, "fuzzy_recall": 3, "selective_copying": 3}
"""Length of the runs by task; the learning rate decays to 0 at their end."""
SEED = 1


def _suite(scale: Scale) -> mad.MadScale:
    """``mad`` at scale cpu with short runs; at scale smoke, with its few sequences."""
    tasks = mad.SCALES["smoke" if scale == "smoke" else "cpu"].tasks
    short = {
        task: dataclasses.replace(tasks[task], epochs=1 if scale == "smoke" else n, patience=70)
        for task, n in EPOCHS.items()
    }
    return dataclasses.replace(mad.SCALES["cpu"], tasks=short)


def cells(scale: Scale) -> list[Cell]:
    """Every model at every rate."""
    suite, found = _suite(scale), []
    for task, setting in suite.tasks.items():
        vocabulary = make_task(task, **setting.options).vocab_size
        for row in mad.MODELS:
            model, marginal = mad.model_config(row, vocabulary, **suite.start), row[-1] == "+"
            for rate in suite.rates:
                labels = {"model": row, "task": task, "lr": f"lr{rate:g}", "seed": f"seed{SEED}"}
                run = mad.task_run(model, task, suite, rate=rate, seed=SEED, marginal=marginal)
                found.append(Cell(experiment="mad-rates", labels=labels, run=run))
    return found


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Validation accuracy of every model at every rate."""
    suite = _suite(scale)

    def accuracies(model: str, task: str) -> str:
        found = [best(results, model=model, task=task, lr=f"lr{rate:g}") for rate in suite.rates]
        return " / ".join(percent(r["validation"]["accuracy"] if r else None) for r in found)

    rows = [[model, *(accuracies(model, task) for task in EPOCHS)] for model in mad.MODELS]
    epochs = ", ".join(f"{s.epochs} ({t.replace('_', ' ')})" for t, s in suite.tasks.items())
    below = notes(
        scale,
        (
            f"{epochs} epochs, seed {SEED}; otherwise as in mad at scale cpu",
            "on the validation set; mad uses the better rate",
        ),
    )
    names = " / ".join(f"{rate:g}" for rate in suite.rates)
    title = f"Short runs, validation accuracy at the rates {names}, %"
    return [Table(title, ["model", *(task.replace("_", " ") for task in EPOCHS)], rows, below)]


EXPERIMENT = Experiment(
    name="mad-rates",
    source="tab:accuracy-heatmap",
    cells=cells,
    tables=tables,
)
