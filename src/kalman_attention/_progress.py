"""Progress of long jobs: live lines on a terminal, an occasional line elsewhere."""

import errno
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from kalman_attention._text import visible

_WIDTH = 20


class Live:
    """Lines that are overwritten on a terminal, and written occasionally to a file or a pipe.

    Args:
        stream: output stream; None for standard error.
        live: seconds between updates on a terminal.
        log: seconds between updates elsewhere.
    """

    def __init__(self, stream: TextIO | None = None, *, live: float, log: float) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.is_live = self.stream.isatty()
        self.period = live if self.is_live else log
        self._shown = 0
        self._closed = False

    def show(self, *lines: str) -> None:
        """Replace the live lines."""
        self.clear()
        # A line that wraps could not be overwritten.
        most = shutil.get_terminal_size().columns - 1 if self.is_live else None
        for line in lines:
            self._print(f"{visible(line)[:most]}\n" if self.is_live else f"{line}\n")
        self._shown = len(lines) if self.is_live else 0

    def note(self, text: str) -> None:
        """Print a permanent line."""
        self.clear()
        self._print(f"{visible(text) if self.is_live else text}\n")

    def clear(self) -> None:
        """Remove the live lines."""
        if self._shown:
            # Cursor up, then erase to the end of the screen.
            self._print(f"\x1b[{self._shown}F\x1b[J")
            self._shown = 0

    def keep(self) -> None:
        """Keep the live lines, and continue below them."""
        self._shown = 0

    def _print(self, text: str) -> None:
        """Print; a closed terminal ends the output, not the work (SIGHUP will follow)."""
        if self._closed:
            return
        try:
            print(text, end="", file=self.stream, flush=True)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            self._closed = True


class Progress:
    """One line: what is being done, how much of it, how fast, and the time left.

    Args:
        what: description of the job.
        total: total number of units; None if unknown.
        unit: name of the unit.
        file: output stream; None for standard error.
    """

    def __init__(
        self, what: str, total: int | None, unit: str = "B", file: TextIO | None = None
    ) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.live = Live(file, live=0.5, log=10.0)
        self.start = self.last = time.monotonic()
        self.first: int | None = None

    def update(self, done: int, note: str = "") -> None:
        """Report the units done; prints at most twice a second, or every 10 s in a log."""
        now = time.monotonic()
        if self.first is None:
            self.first = done  # units of an earlier run do not count for the rate
        if now - self.last < self.live.period:
            return
        self.last = now
        self.live.show(self.line(done, now - self.start) + (f", {note}" if note else ""))

    def line(self, done: int, seconds: float) -> str:
        """The text of the line after ``done`` units and ``seconds``."""
        rate = (done - (self.first or 0)) / max(seconds, 1e-9)
        parts = [f"{self.what}: {_short(done, self.unit)}"]
        if self.total:
            share = 100 * done / self.total
            parts[0] += f" of {_short(self.total, self.unit)} ({share:.0f} %)"
        parts.append(f"{_short(rate, self.unit)}/s")
        if self.total and rate > 0:
            parts.append(f"{duration(max(self.total - done, 0) / rate)} left")
        return ", ".join(parts)

    def close(self) -> None:
        """Remove the line."""
        self.live.clear()


class TrainingProgress:
    """One line for training: step, rate, loss, the last evaluation and the time left.

    Args:
        total: number of updates of the whole run.
        step: updates already made.
        monitor: metric of the evaluation to show; None for the first.
        enabled: False shows nothing, not even notes.
        stream: output stream; None for standard error.
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
        """Report an update; the line is redrawn only after the period of the output."""
        if not self._enabled:
            return
        now = time.perf_counter()
        then, before = self._mark
        if now - then < self._lines.period and step < self._total:
            return
        rate = (step - before) / max(now - then, 1e-9)
        # Smooth the live rate over about two seconds: 20 updates of 0.1 s.
        smooth = self._lines.is_live and self._rate
        self._rate = 0.95 * self._rate + 0.05 * rate if smooth else rate
        self._mark = (now, step)
        left = duration((self._total - step) / max(self._rate, 1e-9))
        parts = [f"step {step}/{self._total}", f"{self._rate:.1f} step/s", f"loss {loss:.4f}"]
        line = "  ".join([*parts, *([self._metric] if self._metric else []), f"{left} left"])
        self._lines.show(f"{bar(step / self._total)} {line}" if self._lines.is_live else line)

    def evaluated(self, step: int, metrics: Mapping[str, float], *, best: bool) -> None:
        """Report an evaluation; it is printed if the line is not live."""
        names = [self._monitor] if self._monitor in metrics else list(metrics)[:1]
        self._metric = "  ".join(f"eval {name} {metrics[name]:.4f}" for name in names if name)
        if self._enabled and not self._lines.is_live:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
            mark = "  best so far" if best else ""
            self._lines.note(f"step {step}/{self._total}  eval: {shown}{mark}")

    def note(self, text: str) -> None:
        """Print a permanent line."""
        if self._enabled:
            self._lines.note(text)

    def close(self) -> None:
        """Keep the live line, and continue below it."""
        self._lines.keep()


def _short(number: float, unit: str) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}{unit if unit == 'B' else f' {unit}'}"
    return f"{number:.0f} {unit}"


def bar(fraction: float) -> str:
    """A bar of fixed width.

    >>> bar(0.25)
    '[#####---------------]'
    """
    full = min(_WIDTH, int(_WIDTH * fraction))
    return f"[{'#' * full}{'-' * (_WIDTH - full)}]"


def duration(seconds: float) -> str:
    """Format seconds for human readers.

    >>> duration(59.6), duration(3725), duration(200_000)
    ('1:00', '1:02:05', '2 d 7 h')
    """
    whole = round(seconds)
    if whole >= 48 * 3600:
        return f"{whole // 86400} d {whole % 86400 // 3600} h"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
