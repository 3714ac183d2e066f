"""A line that says how training goes: live on a terminal, now and then elsewhere."""

import time
from collections.abc import Mapping
from typing import TextIO

from kalman_attention.data.progress import Live, bar, duration


class Progress:
    """Show step, rate, loss, the last evaluation and the time left.

    Args:
        total: number of updates of the whole run.
        step: updates already made.
        monitor: metric of the evaluation to show; None shows the first.
        enabled: False shows nothing at all, notes included.
        stream: where to write; None for standard error.
    """

    def __init__(
        self,
        total: int,
        step: int,
        *,
        monitor: str | None = None,
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self._total, self._monitor, self._enabled = total, monitor, enabled
        self._lines = Live(stream, live=0.1, log=30.0)
        self._metric = ""
        self._rate = 0.0
        self._mark = (time.perf_counter(), step)

    def update(self, step: int, loss: float) -> None:
        """Called after every update; shows something only when it is time."""
        if not self._enabled:
            return
        now = time.perf_counter()
        then, before = self._mark
        if now - then < self._lines.period and step < self._total:
            return
        rate = (step - before) / max(now - then, 1e-9)
        # Live figures are smoothed over about two seconds.
        smooth = self._lines.is_live and self._rate
        self._rate = 0.95 * self._rate + 0.05 * rate if smooth else rate
        self._mark = (now, step)
        left = duration((self._total - step) / max(self._rate, 1e-9))
        parts = [f"step {step}/{self._total}", f"{self._rate:.1f} step/s", f"loss {loss:.4f}"]
        line = "  ".join([*parts, *([self._metric] if self._metric else []), f"{left} left"])
        self._lines.show(f"{bar(step / self._total)} {line}" if self._lines.is_live else line)

    def evaluated(self, step: int, metrics: Mapping[str, float], *, best: bool) -> None:
        """Take note of an evaluation; where the line is not live, print it."""
        names = [self._monitor] if self._monitor in metrics else list(metrics)[:1]
        self._metric = "  ".join(f"eval {name} {metrics[name]:.4f}" for name in names if name)
        if self._enabled and not self._lines.is_live:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            mark = "  best so far" if best else ""
            self._lines.note(f"step {step}/{self._total}  eval: {shown}{mark}")

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self._enabled:
            self._lines.note(text)

    def close(self) -> None:
        """Leave the live line, and go on below it."""
        self._lines.keep()
