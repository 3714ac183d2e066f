"""Compute many cells: one thread each, several processes, and never the same cell twice."""

import contextlib
import functools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch

from kalman_attention._processes import worker_processes
from kalman_attention.recipes.cell import Cell, Results
from kalman_attention.recipes.machine import keep_memory

Say = Callable[[str], None]
Watch = Callable[[Sequence[Cell]], None]


def run_cells(
    cells: Sequence[Cell],
    results: Results,
    *,
    jobs: int = 1,
    say: Say = print,
    watch: Watch | None = None,
) -> list[dict[str, Any]]:
    """Compute the cells that have no result yet.

    A kill at any moment loses nothing: finished cells are files, and an unfinished one resumes from
    its last checkpoint when the same call is made again.

    Args:
        cells: the cells to compute.
        results: the result files.
        jobs: number of processes; each uses one thread, so that results do not depend on it.
        say: called with a line for every finished cell.
        watch: called about once a second with the cells that are running in processes.

    Returns:
        The results of all cells, in order.
    """
    missing = [cell for cell in cells if results.load(cell) is None]
    if len(missing) < len(cells):
        say(f"{len(cells) - len(missing)} of {len(cells)} cells are already finished")
    done = _one_by_one(missing, results)
    if jobs > 1:
        done = _in_processes(missing, results, jobs, watch or (lambda running: None))
    began = time.perf_counter()
    with contextlib.closing(done), _saying_what_is_kept(missing, results, say):
        for number, cell in enumerate(done, 1):
            left = (time.perf_counter() - began) / number * (len(missing) - number)
            result = results.load(cell)
            assert result is not None
            shown = "  ".join(f"{name} {value:.4f}" for name, value in _few(result["metrics"]))
            say(f"[{number}/{len(missing)}] {cell.name}: {shown}  (about {left / 60:.0f} min left)")
    return [result for cell in cells if (result := results.load(cell)) is not None]


@contextlib.contextmanager
def _saying_what_is_kept(cells: Sequence[Cell], results: Results, say: Say) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        finished = sum(results.path(cell).exists() for cell in cells)
        with contextlib.suppress(OSError):  # the terminal may be gone
            say(
                f"stopped: {finished} of {len(cells)} cells are finished and kept; the same "
                "command resumes from there"
            )
        raise


def _few(metrics: dict[str, Any]) -> list[tuple[str, float]]:
    return [(k, v) for k, v in metrics.items() if isinstance(v, float)][:2]


def _one_by_one(cells: Sequence[Cell], results: Results) -> Generator[Cell, None, None]:
    before = torch.get_num_threads()
    try:
        for cell in cells:
            compute(cell, results, show=True)
            yield cell
    finally:
        torch.set_num_threads(before)


def _in_processes(
    cells: Sequence[Cell], results: Results, jobs: int, watch: Watch
) -> Generator[Cell, None, None]:
    work = functools.partial(compute, results=results, show=False)
    with worker_processes(jobs, keep_memory) as workers:
        for cell, _ in workers.as_completed(work, cells, watch):
            yield cell


def compute(cell: Cell, results: Results, *, show: bool) -> None:
    """Compute one cell with one thread and write its result."""
    torch.set_num_threads(1)
    folder = results.workplace(cell)
    folder.mkdir(parents=True, exist_ok=True)
    results.save(cell, cell.run.execute(folder, show=show))
