"""A line that says how training goes: live on a terminal, now and then elsewhere."""

import errno
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

_WIDTH = 20


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
        self._stream = sys.stderr if stream is None else stream
        self._live = enabled and self._stream.isatty()
        self._period = 0.1 if self._live else 30.0
        self._metric = ""
        self._rate = 0.0
        self._shown = ""
        self._mark = (time.perf_counter(), step)

    def update(self, step: int, loss: float) -> None:
        """Called after every update; shows something only when it is time."""
        if not self._enabled:
            return
        now = time.perf_counter()
        then, before = self._mark
        if now - then < self._period and step < self._total:
            return
        rate = (step - before) / max(now - then, 1e-9)
        # Live figures are smoothed over about two seconds.
        self._rate = rate if not (self._live and self._rate) else 0.95 * self._rate + 0.05 * rate
        self._mark = (now, step)
        left = duration((self._total - step) / max(self._rate, 1e-9))
        parts = [f"step {step}/{self._total}", f"{self._rate:.1f} step/s", f"loss {loss:.4f}"]
        line = "  ".join([*parts, *([self._metric] if self._metric else []), f"{left} left"])
        if self._live:
            self._draw(f"{bar(step / self._total)} {line}")
        else:
            self._print(line)

    def evaluated(self, step: int, metrics: Mapping[str, float], *, best: bool) -> None:
        """Take note of an evaluation; where the line is not live, print it."""
        names = [self._monitor] if self._monitor in metrics else list(metrics)[:1]
        self._metric = "  ".join(f"eval {name} {metrics[name]:.4f}" for name in names if name)
        if self._enabled and not self._live:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            mark = "  best so far" if best else ""
            self._print(f"step {step}/{self._total}  eval: {shown}{mark}")

    def note(self, text: str) -> None:
        """Print a line that stays."""
        if self._enabled:
            self._draw("")
            self._print(text)

    def close(self) -> None:
        """Leave the live line, and go on below it."""
        if self._shown:
            self._print("")
            self._shown = ""

    def _draw(self, line: str) -> None:
        """Overwrite the live line; one that wraps could not be overwritten."""
        line = line[: shutil.get_terminal_size().columns - 1]
        if self._live and (line or self._shown):
            blank = " " * max(0, len(self._shown) - len(line))
            self._print(f"\r{line}{blank}", end="" if line else "\r")
            self._shown = line

    def _print(self, text: str, end: str = "\n") -> None:
        """Print; a terminal that is closed ends the show, not the training (SIGHUP will follow)."""
        if self._enabled:
            try:
                print(text, end=end, file=self._stream, flush=True)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                self._enabled = False


def bar(fraction: float) -> str:
    """A bar of fixed width.

    >>> bar(0.25)
    '[#####---------------]'
    """
    full = min(_WIDTH, int(_WIDTH * fraction))
    return f"[{'#' * full}{'-' * (_WIDTH - full)}]"


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(59.6), duration(3725), duration(200_000)
    ('1:00', '1:02:05', '2 d 7 h')
    """
    whole = round(seconds)
    if whole >= 48 * 3600:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
