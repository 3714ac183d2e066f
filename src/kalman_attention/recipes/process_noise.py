"""``process-noise``: learned process noise against none, on MAD (``tab:process-noise-ablation``).

The runs with learned noise are those of ``mad`` with its first seed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kalman_attention._tables import Table, percent
from kalman_attention.published import MAD_TASKS, PROCESS_NOISE
from kalman_attention.recipes import mad
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, mean_of_best, notes
from kalman_attention.recipes.task_run import TaskRun

_ROWS = {"learned": "kla", "zero": "kla,p=0"}


def cells(scale: Scale) -> list[Cell]:
    """The KLA runs of ``mad`` at the rates chosen there, and each of them again with p = 0."""
    learned = mad.chosen_cells(scale, dict.fromkeys(MAD_TASKS, ("kla",)))
    return [*learned, *(_without_noise(cell) for cell in learned)]


def _without_noise(cell: Cell) -> Cell:
    run = cell.run
    assert isinstance(run, TaskRun)
    layer = dataclasses.replace(run.model.mixer_options("kla"), process_noise="zero")
    return Cell(
        experiment="process-noise",
        labels={**cell.labels, "model": _ROWS["zero"]},
        run=dataclasses.replace(run, model=dataclasses.replace(run.model, kla=layer)),
    )


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Both variants, with the paper's figures in brackets, and the difference."""
    found = {
        row: {t: mean_of_best(results, model=model, task=t) for t in MAD_TASKS}
        for row, model in _ROWS.items()
    }
    rows = [
        [f"p {row}", *(percent(found[row][t], PROCESS_NOISE[row][t]) for t in MAD_TASKS)]
        for row in _ROWS
    ]
    rows.append(["zero - learned", *(_difference(found, t) for t in MAD_TASKS)])
    header = ["process noise", *(task.replace("_", " ") for task in MAD_TASKS)]
    below = notes(
        scale, ["otherwise as mad with its first seed, at the learning rate chosen there"]
    )
    return [Table("Process noise, accuracy, % (paper)", header, rows, below)]


def _difference(found: dict[str, dict[str, float | None]], task: str) -> str:
    zero, learned = found["zero"][task], found["learned"][task]
    theirs = PROCESS_NOISE["zero"][task] - PROCESS_NOISE["learned"][task]
    ours = "-" if zero is None or learned is None else f"{100 * (zero - learned):+.1f}"
    return f"{ours} ({theirs:+.1f})"


EXPERIMENT = Experiment(
    name="process-noise",
    source="tab:process-noise-ablation",
    cells=cells,
    tables=tables,
)
