"""``mad``: one block of each mixer on the six MAD tasks (``tab:accuracy-heatmap``).

``mad`` has the paper's scaffold, an encoder and a decoder MLP around the block. ``mad-bare`` has
the block alone, and shorter sequences at the ``cpu`` scale. ``mad-variations`` and
``process-noise`` build on the runs of the former. The settings are in ``mad_scales``.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from kalman_attention._tables import Table, percent
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.matching import PAPER_MODELS
from kalman_attention.models.scaffold import with_scaffold
from kalman_attention.published import MAD, MAD_TASKS
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, best, mean_of_best, notes
from kalman_attention.recipes.mad_scales import (
    FORM_TASKS,
    FORMS,
    MODELS,
    SCALES,
    SUITES,
    MadScale,
)
from kalman_attention.recipes.task_run import TaskRun, published_training
from kalman_attention.tasks.registry import make_task


def task_run(
    model: LanguageModelConfig,
    task: str,
    suite: MadScale,
    *,
    rate: float,
    seed: int,
    marginal: bool = False,
) -> TaskRun:
    """One training run of the suite, for a model with the vocabulary of its task.

    Training ends at an accuracy of 99.9 %, as in MAD-Lab.
    """
    scale = suite.tasks[task]
    return TaskRun(
        task=task,
        task_options=scale.options,
        model=with_scaffold(model, suite.scaffold),
        loss="marginal" if marginal else "mean",
        batch_size=suite.batch_size,
        eval_batch_size=suite.eval_batch_size,
        training=published_training(
            epochs=scale.epochs,
            seed=seed,
            lr=rate,
            patience=scale.patience,
            schedule=suite.schedule,
        ),
        validation_size=suite.validation_size,
    )


def model_config(row: str, vocab_size: int, **kla: Any) -> LanguageModelConfig:
    """The model of a row: one block at the state size of the paper's table, with MAD's head.

    Args:
        row: a name of ``MODELS`` or ``FORMS``.
        vocab_size: vocabulary size of the task.
        **kla: options of KLA that differ from the defaults of the layer.
    """
    mixer = "kla" if row in FORMS else row.removesuffix("+")
    paper = next(x for x in PAPER_MODELS["mad"] if x.mixer == mixer)
    model = dataclasses.replace(paper.model("matched", vocab_size=vocab_size), head_bias=True)
    if mixer != "kla":
        return model
    layer = dataclasses.replace(model.mixer_options("kla"), **kla, **FORMS.get(row, {}))
    return dataclasses.replace(model, kla=layer)


def cells(scale: Scale, name: str = "mad") -> list[Cell]:
    """Every model on every task, for every learning rate, and some of them with more seeds.

    Args:
        scale: the scale.
        name: the suite, ``"mad"`` or ``"mad-bare"``.
    """
    suite = SUITES[name][scale]
    found = []
    for seed in (*suite.seeds, *suite.more_seeds):
        for task in MAD_TASKS:
            vocabulary = make_task(task, **suite.tasks[task].options).vocab_size
            for row in suite.rows_of(task, seed):
                model = model_config(row, vocabulary, **suite.start)
                for rate in suite.rates_of_row(task, row, seed):
                    labels = {
                        "model": row,
                        "task": task,
                        "lr": f"lr{rate:g}",
                        "seed": f"seed{seed}",
                    }
                    run = task_run(
                        model, task, suite, rate=rate, seed=seed, marginal=row.endswith("+")
                    )
                    found.append(Cell(experiment=name, labels=labels, run=run))
    return found


def chosen_cells(
    scale: Scale, chosen: Mapping[str, Sequence[str]], seeds: Sequence[int] | None = None
) -> list[Cell]:
    """Some cells of ``mad``, each model at the learning rate that the suite chose for it.

    Args:
        scale: the scale.
        chosen: the models of each task.
        seeds: the seeds (default: those of every run, without ``more_seeds``).
    """
    suite = SCALES[scale]
    named_seeds = _labels(suite.seeds if seeds is None else seeds)

    def asked(task: str, model: str, lr: str, seed: str) -> bool:
        rate = f"lr{suite.chosen(task, model):g}"
        return model in chosen.get(task, ()) and lr == rate and seed in named_seeds

    named = ("task", "model", "lr", "seed")
    return [c for c in cells(scale) if asked(*(c.labels[x] for x in named))]


def _labels(seeds: Sequence[int]) -> list[str]:
    return [f"seed{seed}" for seed in seeds]


def tables(scale: Scale, results: Sequence[dict[str, Any]], name: str = "mad") -> list[Table]:
    """Tables of macro accuracy, with the paper's in brackets, token accuracy, rates and seeds."""
    suite = SUITES[name][scale]
    as_above = notes(scale, ["settings as above"])
    with_first = notes(scale, ["settings as above, with the first seed"])
    title = "MAD" if suite.scaffold == "encoder-decoder" else "MAD without encoder and decoder"
    rows = (*MODELS, *suite.forms)

    def ours(model: str, task: str, metric: str = "accuracy") -> float | None:
        return mean_of_best(results, metric, model=model, task=task)

    return [
        _by_task(
            f"{title}, macro accuracy, as in MAD-Lab, % (paper)",
            lambda model, task: percent(ours(model, task), MAD.get(model, {}).get(task)),
            notes(scale, suite.changes),
            rows,
        ),
        _by_task(
            f"{title}, token accuracy, %",
            lambda model, task: percent(ours(model, task, "token_accuracy")),
            as_above,
            rows,
        ),
        *_rates(title, suite, results, with_first if suite.more_seeds else as_above),
        *_seeds(title, suite, results, as_above),
    ]


def _by_task(
    title: str,
    cell: Callable[[str, str], str],
    below: list[str],
    rows: Sequence[str],
    tasks: Sequence[str] = MAD_TASKS,
) -> Table:
    def line(row: str) -> list[str]:
        asked = FORM_TASKS if row in FORMS else tasks
        name = f"kla, {row}" if row in FORMS else row
        return [name, *(cell(row, task) if task in asked else "" for task in tasks)]

    header = ["model", *(task.replace("_", " ") for task in tasks)]
    return Table(title, header, [line(row) for row in rows], below)


def _rates(
    title: str, suite: MadScale, results: Sequence[dict[str, Any]], below: list[str]
) -> list[Table]:
    """Accuracy at each learning rate, a table for all tasks that share several."""
    first = [r for r in results if r["labels"]["seed"] in _labels(suite.seeds)]

    def cell(model: str, task: str) -> str:
        found = [
            mean_of_best(first, model=model, task=task, lr=f"lr{rate:g}")
            for rate in suite.rates_of(task)
        ]
        return " / ".join(percent(accuracy) for accuracy in found)

    found = []
    rows = [row for row in (*MODELS, *suite.forms) if row not in suite.at_rate_of_kla]
    for rates in dict.fromkeys(suite.rates_of(task) for task in MAD_TASKS):
        if len(rates) > 1:
            tasks = [task for task in MAD_TASKS if suite.rates_of(task) == rates]
            names = " / ".join(f"{rate:g}" for rate in rates)
            heading = f"{title}, macro accuracy at the rates {names}, %"
            found.append(_by_task(heading, cell, below, rows, tasks))
    return found


def _seeds(
    title: str, suite: MadScale, results: Sequence[dict[str, Any]], below: list[str]
) -> list[Table]:
    """Accuracy with each seed and its mean, for the rows that have more of them than others."""
    seeds = _labels((*suite.seeds, *suite.more_seeds))

    def line(task: str, row: str) -> list[str]:
        runs = [best(results, model=row, task=task, seed=seed) for seed in seeds]
        found = {s: r["metrics"]["accuracy"] for s, r in zip(seeds, runs, strict=True) if r}
        average = mean(found.values()) if len(found) == len(seeds) else None
        return [
            task.replace("_", " "),
            row,
            *(percent(x) for x in (*map(found.get, seeds), average)),
        ]

    lines = [line(task, row) for task, rows in suite.repeated.items() for row in rows]
    header = ["task", "model", *(seed.replace("seed", "seed ") for seed in seeds), "mean"]
    return [Table(f"{title}, macro accuracy by seed, %", header, lines, below)] if lines else []


EXPERIMENT = Experiment(
    name="mad",
    source="tab:accuracy-heatmap",
    cells=cells,
    tables=tables,
)
BARE_EXPERIMENT = Experiment(
    name="mad-bare",
    source="tab:accuracy-heatmap",
    cells=partial(cells, name="mad-bare"),
    tables=partial(tables, name="mad-bare"),
)
