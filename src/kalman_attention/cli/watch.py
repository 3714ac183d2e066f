"""Progress of cells that train in other processes: one line each, from their metrics files."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from kalman_attention._progress import Live, bar
from kalman_attention.recipes.cell import Cell, Results
from kalman_attention.train.metrics import METRICS


class CellProgress:
    """Shows the progress of running cells: live on a terminal, periodically elsewhere.

    Args:
        results: results of the cells.
        stream: stream to write to; None for standard error.
        period: seconds between updates if the stream is not a terminal.
    """

    def __init__(
        self, results: Results, *, stream: TextIO | None = None, period: float = 30.0
    ) -> None:
        self._results = results
        self._lines = Live(stream, live=1.0, log=period)
        self._next = 0.0

    def __call__(self, running: Sequence[Cell]) -> None:
        """Show the progress if the last update is old enough; may be called often."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._lines.period
        self._lines.show(*(line for cell in running if (line := self._line(cell))))

    def say(self, text: str) -> None:
        """Print a permanent line above the live ones."""
        self._lines.clear()
        print(text, flush=True)

    def _line(self, cell: Cell) -> str:
        record = last_record(self._results.workplace(cell) / METRICS)
        if record is None:
            return ""
        done = bar(record["step"] / cell.run.updates)
        shown = [f"{k} {record[k]:.3f}" for k in ("loss", "accuracy") if record.get(k) is not None]
        return f"  {done} {cell.name}  step {record['step']}  {'  '.join(shown)}"


def last_record(path: Path) -> dict[str, float] | None:
    """The latest value of every metric in a file; None if it is empty."""
    try:
        with path.open("rb") as file:
            # The last records are enough, and this is called often: no need to read the rest.
            file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    found: dict[str, float] = {}
    for line in lines:
        try:
            found.update(json.loads(line))
        except ValueError:
            continue  # the first line may be incomplete
    return found if "step" in found else None
