"""``rotation``: the effect of rotating blocks where no state has to be tracked.

One block on short recall and short selective copying, in the scaffold of ``mad``, with the same
budget for every form: the paper's layer, precision shared by blocks of four slots, the same with
two reflections per token, and the initialisation of ``KLAConfig.tracking`` with a convolution. For
text, ``text-ladder`` has the rungs "shared 4" and "shared 4, rotating".
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from kalman_attention._tables import Table, percent
from kalman_attention.nn.config import KLAConfig
from kalman_attention.recipes import mad, mad_scales
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, best, notes
from kalman_attention.tasks.registry import make_task

TASKS = {
    "recall": mad_scales.TaskScale(options={"seq_len": 64}, epochs=16, patience=8),
    "selective_copying": mad_scales.TaskScale(options={"seq_len": 64, "num_copied": 8}, epochs=12),
}
"""Short forms of two MAD tasks."""
RATE = 1e-3  # not tuned: the same for every form
SEEDS = (0, 1)
FORMS = ("kla", *mad_scales.FORMS, "tracking initialisation")
"""Rows of the table."""


def _layer(form: str, base: KLAConfig) -> KLAConfig:
    """The layer of a form, with the sizes of the paper's layer."""
    if form != "tracking initialisation":
        return dataclasses.replace(base, **mad_scales.FORMS.get(form, {}))
    sizes = {name: getattr(base, name) for name in ("d_model", "d_state", "conv_kernel")}
    return KLAConfig.tracking(**sizes)


def _suite(scale: Scale) -> mad_scales.MadScale:
    """``mad`` at scale cpu with the short tasks; one epoch of few sequences at scale smoke."""
    if scale == "smoke":
        suite = mad_scales.SCALES["smoke"]
        return dataclasses.replace(suite, tasks={task: suite.tasks[task] for task in TASKS})
    return dataclasses.replace(mad_scales.SCALES["cpu"], tasks=TASKS)


def cells(scale: Scale) -> list[Cell]:
    """Every form on both tasks with both seeds; one seed at scale smoke."""
    suite = _suite(scale)
    found = []
    for seed in SEEDS[:1] if scale == "smoke" else SEEDS:
        for task, setting in suite.tasks.items():
            vocabulary = make_task(task, **setting.options).vocab_size
            plain = mad.model_config("kla", vocabulary, **suite.start)
            base = plain.mixer_options("kla")
            assert isinstance(base, KLAConfig)
            for form in FORMS:
                model = dataclasses.replace(plain, kla=_layer(form, base))
                labels = {"model": form, "task": task, "seed": f"seed{seed}"}
                run = mad.task_run(model, task, suite, rate=RATE, seed=seed)
                found.append(Cell(experiment="rotation", labels=labels, run=run))
    return found


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Test accuracy of every form on both tasks, seed by seed."""
    suite = _suite(scale)

    def accuracy(form: str, task: str) -> str:
        seeds = [best(results, model=form, task=task, seed=f"seed{seed}") for seed in SEEDS]
        return " / ".join(
            f"{percent(r['metrics']['accuracy'])} ({r['steps']:,})" if r else "-" for r in seeds
        )

    rows = [[form, *(accuracy(form, task) for task in suite.tasks)] for form in FORMS]
    epochs = ", ".join(f"{setting.epochs} ({task})" for task, setting in suite.tasks.items())
    tokens = suite.tasks["recall"].options["seq_len"]
    copied = suite.tasks["selective_copying"].options["num_copied"]
    below = notes(
        scale,
        (
            f"{tokens} tokens, {copied} to copy, at most {epochs} epochs, rate {RATE:g}, not tuned "
            "for any form; otherwise as in mad",
            f"seeds {' / '.join(str(seed) for seed in SEEDS)}; training ends at 99.9 %",
        ),
    )
    names = [task.replace("_", " ") for task in suite.tasks]
    title = "Rotating blocks where nothing has to be tracked, test accuracy, % (updates)"
    return [Table(title, ["model", *names], rows, below)]


EXPERIMENT = Experiment(name="rotation", source=None, cells=cells, tables=tables)
