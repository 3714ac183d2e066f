"""One line that says how far a long run is: share done, rate, time left."""

import sys
import time
from typing import TextIO


class Progress:
    """Prints to a terminal as it goes, and elsewhere now and then.

    Args:
        what: what is being done.
        total: units in all; None if that is not known.
        unit: what is counted.
        file: where to print; None for standard error.
    """

    def __init__(
        self, what: str, total: int | None, unit: str = "B", file: TextIO | None = None
    ) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.file = file or sys.stderr
        self.live = self.file.isatty()
        self.start = self.last = time.monotonic()
        self.first: int | None = None

    def update(self, done: int, note: str = "") -> None:
        """Say how many units are done; prints at most twice a second, or every 10 s in a log."""
        now = time.monotonic()
        if self.first is None:
            self.first = done  # what an earlier run did says nothing about the rate of this one
        if now - self.last < (0.5 if self.live else 10.0):
            return
        self.last = now
        line = self.line(done, now - self.start) + (f", {note}" if note else "")
        self.file.write(f"\r\x1b[K{line}" if self.live else f"{line}\n")
        self.file.flush()

    def line(self, done: int, seconds: float) -> str:
        """The text for so many units after so many seconds."""
        rate = (done - (self.first or 0)) / max(seconds, 1e-9)
        parts = [f"{self.what}: {_short(done, self.unit)}"]
        if self.total:
            share = 100 * done / self.total
            parts[0] += f" of {_short(self.total, self.unit)} ({share:.0f} %)"
        parts.append(f"{_short(rate, self.unit)}/s")
        if self.total and rate > 0:
            parts.append(f"{_clock((self.total - done) / rate)} left")
        return ", ".join(parts)

    def close(self) -> None:
        """Leave the line as it was."""
        if self.live:
            self.file.write("\r\x1b[K")
            self.file.flush()


def _short(number: float, unit: str) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}{unit if unit == 'B' else f' {unit}'}"
    return f"{number:.0f} {unit}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
