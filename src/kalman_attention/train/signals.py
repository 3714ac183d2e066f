"""Ctrl-C and SIGTERM as a wish that is granted at the next step."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Signals:
    """While active, a first signal is only remembered; a second Ctrl-C stops at once.

    An update that is cut in the middle would leave weights that belong to no step.

    Args:
        announce: say on standard error that the first one was heard.
    """

    def __init__(self, *, announce: bool = True) -> None:
        self.announce = announce
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python forbids it
            for number in _NAMES:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def name(self) -> str:
        """What was received, for people."""
        return "" if self.received is None else _NAMES[signal.Signals(self.received)]

    def stop(self) -> None:
        """End the program the way that the signal asks for, now that all is saved."""
        if self.received == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt(f"training stopped by {self.name}; everything is saved")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        if self.announce:  # by a plain write: printing is not safe in a handler
            text = f"\n{self.name}: saving after this step; Ctrl-C again stops at once\n"
            os.write(2, text.encode())
