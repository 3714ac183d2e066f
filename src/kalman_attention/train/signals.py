"""What ends a program: Ctrl-C, SIGTERM of a scheduler, SIGHUP of a terminal that is closed.

A command ends at once, but by an exception, so that its workers end before it. Training grants the
wish at the next step, with everything saved. ``nohup`` stays what it is: an ignored SIGHUP is left
alone.
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
    """While active, SIGTERM and SIGHUP raise ``SystemExit``, as Ctrl-C raises KeyboardInterrupt.

    Left to themselves they end Python on the spot, and nothing is closed or told to stop.
    """

    def end(number: int, frame: FrameType | None) -> None:
        leave_dead_terminal()
        with suppress(OSError):  # by a plain write: printing is not safe in a handler
            os.write(2, f"\nstopped by {_NAMES[signal.Signals(number)]}\n".encode())
        raise SystemExit(128 + number)

    before = _handle([number for number in _NAMES if number != signal.SIGINT], end)
    try:
        yield
    finally:
        _restore(before)


class StopNow(BaseException):
    """A signal has cut what can be done again."""


class Signals:
    """While active, a first signal is only remembered; a second Ctrl-C stops at once.

    An update that is cut in the middle would leave weights that belong to no step. An evaluation,
    which may take minutes, can be cut: see ``at_once``.

    Args:
        announce: say on standard error that the first one was heard.
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
        """While active, a signal raises ``StopNow``, also one that came before."""
        self._cutting = True
        try:
            if self.received is not None:
                raise StopNow
            yield
        finally:
            self._cutting = False

    @property
    def name(self) -> str:
        """What was received, for people."""
        return "" if self.received is None else _NAMES[signal.Signals(self.received)]

    def stop(self) -> NoReturn:
        """End the program the way that the signal asks for, now that all is saved."""
        if self.received not in (None, signal.SIGINT):
            raise SystemExit(128 + self.received)
        raise KeyboardInterrupt(f"training stopped by {self.name}; everything is saved")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        leave_dead_terminal()
        first, self.received = self.received is None, number
        if self.announce and first:  # by a plain write: printing is not safe in a handler
            text = f"\n{self.name}: saving after this step; Ctrl-C again stops at once\n"
            with suppress(OSError):
                os.write(2, text.encode())
        if self._cutting:
            raise StopNow


def leave_dead_terminal() -> None:
    """Turn output to a terminal that was closed to nowhere: it would be an error, not a message."""
    for output in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, output)
                os.close(nowhere)


def _handle(
    numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]
) -> dict[int, Any]:
    """Install a handler where Python allows it; returns those that were there before."""
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
