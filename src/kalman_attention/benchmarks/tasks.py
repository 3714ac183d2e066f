"""``kla bench tasks``: one training update of every model of an experiment."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kalman_attention._tables import render
from kalman_attention.benchmarks.measure import fastest, save_results, use_threads
from kalman_attention.benchmarks.options import TaskOptions, settings
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.registry import load_experiment
from kalman_attention.recipes.task_run import TaskRun


def bench_tasks(options: TaskOptions, *, out: Path | None = None) -> dict[str, Any]:
    """Time the updates of an experiment on synthetic tasks, and print what its runs take.

    The models of a task take turns, with one thread each, as in ``kla reproduce``.

    Args:
        options: experiment and effort.
        out: folder for ``tasks.json``; None writes nothing.

    Returns:
        The settings, and for every cell the seconds per update and the maximum number of updates.
    """
    groups = _by_task(_distinct(load_experiment(options.experiment).cells(options.scale), options))
    if not groups:
        raise ValueError(
            f"no run of {options.experiment} on a synthetic task matches {options.only!r}: "
            f"'kla reproduce {options.experiment} --list' shows the labels."
        )
    found: dict[str, dict[str, float]] = {}
    with use_threads(1):
        for cells in groups.values():
            updates = {name: run.updater() for name, run in cells.items()}
            times = fastest(updates, seconds=options.seconds, most=options.repeats)
            found |= {
                name: {"seconds": times[name], "updates": run.updates}
                for name, run in cells.items()
            }
    rows = [
        [name, f"{1e3 * x['seconds']:.1f}", f"{x['updates']:,}", _minutes(x)]
        for name, x in found.items()
    ]
    print("one thread, best of interleaved updates; evaluations not included\n")
    print(render(["run", "ms per update", "updates at most", "minutes at most"], rows))
    results = {"settings": settings("tasks", options), "updates": found}
    if out is not None:
        save_results(out / "tasks.json", results)
        print(f"\nresults: {out / 'tasks.json'}")
    return results


def _distinct(cells: Sequence[Cell], options: TaskOptions) -> dict[str, TaskRun]:
    """The runs that differ in more than learning rate and seed, by their other labels."""
    found: dict[str, TaskRun] = {}
    for cell in cells:
        if isinstance(cell.run, TaskRun) and (options.only is None or cell.matches(options.only)):
            labels = (v for k, v in cell.labels.items() if k not in ("lr", "seed"))
            found.setdefault("/".join(labels), cell.run)
    return found


def _by_task(runs: dict[str, TaskRun]) -> dict[str, dict[str, TaskRun]]:
    groups: dict[str, dict[str, TaskRun]] = {}
    for name, run in runs.items():
        groups.setdefault(run.task, {})[name] = run
    return groups


def _minutes(found: dict[str, float]) -> str:
    return f"{found['seconds'] * found['updates'] / 60:.1f}"
