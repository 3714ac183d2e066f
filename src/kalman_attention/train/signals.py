"""Signals that end a program: Ctrl-C, SIGTERM from a scheduler, SIGHUP from a closed terminal.

A command ends immediately, but through an exception, so that its workers end before it. Training
stops after the current step, with everything saved. ``nohup`` works: an ignored SIGHUP stays
ignored.
"""

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn

_NAMES = {
    number: shown
    for name, shown in (("SIGINT", "Ctrl-C"), ("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGHUP"))
    if (number := getattr(signal, name, None)) is not None  # Windows has no SIGHUP
}


@contextmanager
def ending_by_exception() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP raise ``SystemExit``.

    By default they terminate Python without any cleanup.
    """

    def end(number: int, frame: FrameType | None) -> None:
        leave_dead_terminal()
        with suppress(OSError):  # os.write, because print is not safe in a signal handler
            os.write(2, f"\nstopped by {_NAMES[signal.Signals(number)]}\n".encode())
        raise SystemExit(128 + number)

    before = _handle([number for number in _NAMES if number != signal.SIGINT], end)
    try:
        yield
    finally:
        _restore(before)


class StopNow(BaseException):
    """A signal interrupted work that can be repeated."""


class Signals:
    """A context in which the first signal is only recorded; a second Ctrl-C stops immediately.

    An interrupted update would leave weights that belong to no step. An evaluation, which may take
    minutes, can be interrupted: see ``at_once``.

    Args:
        announce: acknowledge the first signal on standard error.
    """

    def __init__(self, *, announce: bool = True) -> None:
        self.announce = announce
        self.received: int | None = None
        self._cutting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        self._before = _handle(list(_NAMES), self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _restore(self._before)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A context in which a signal raises ``StopNow``, even one received earlier."""
        self._cutting = True
        try:
            if self.received is not None:
                raise StopNow
            yield
        finally:
            self._cutting = False

    @property
    def name(self) -> str:
        """Name of the received signal, for messages."""
        return "" if self.received is None else _NAMES[signal.Signals(self.received)]

    def stop(self) -> NoReturn:
        """End the program as the signal requests, after everything has been saved."""
        if self.received not in (None, signal.SIGINT):
            raise SystemExit(128 + self.received)  # the convention of shells
        raise KeyboardInterrupt(f"training stopped by {self.name}; everything is saved")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        leave_dead_terminal()
        first, self.received = self.received is None, number
        if self.announce and first:  # os.write, because print is not safe in a signal handler
            text = f"\n{self.name}: saving after this step; Ctrl-C again stops at once\n"
            with suppress(OSError):
                os.write(2, text.encode())
        if self._cutting:
            raise StopNow


def leave_dead_terminal() -> None:
    """Redirect output from a closed terminal to nowhere, because writing to it would fail."""
    for output in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, output)
                os.close(nowhere)


def _handle(
    numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]
) -> dict[int, Any]:
    """Install a handler if this is the main thread; return the previous handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    ignored = getattr(signal, "SIGHUP", None)
    return {
        number: signal.signal(number, handler)
        for number in numbers
        if number != ignored or signal.getsignal(number) is not signal.SIG_IGN
    }


def _restore(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)
