"""Standard input and output: closed, limited to ASCII, a terminal, or a pipe."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from kalman_attention._text import visible


class Screen:
    """A terminal that displays control characters of texts instead of executing them.

    Args:
        raw: the terminal itself, for colours and live lines.
    """

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write text from any source."""
        return self.raw.write(visible(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Make standard output and standard error safe to print to inside the context."""
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)  # takes descriptor 0 before another file does
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        raise ValueError(
            "standard output is closed: redirect it to /dev/null to discard the output."
        )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters outside of ASCII
    before = sys.stdout
    if before.isatty():
        sys.stdout = cast(TextIO, Screen(before))
    try:
        yield
    finally:
        sys.stdout = before


def paint(text: str) -> None:
    """Write to standard output immediately, including our own control sequences."""
    raw: TextIO = getattr(sys.stdout, "raw", sys.stdout)
    raw.write(text)
    raw.flush()


def complain(text: str) -> None:
    """Print a line on standard error; only when no progress is shown there."""
    print(visible(text) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def read_prompt(given: str | None) -> str:
    """The text of an argument, or standard input for ``-`` and None; UTF-8 in any locale."""
    if given is not None and given != "-":
        data = os.fsencode(given)
    elif sys.stdin is None:
        raise ValueError("there is no prompt: standard input is closed. Give it as an argument.")
    else:
        if sys.stdin.isatty():
            print("prompt (end with Ctrl-D):", file=sys.stderr)
        binary = getattr(sys.stdin, "buffer", None)
        data = sys.stdin.read().encode() if binary is None else binary.read()
        data = data.removesuffix(b"\n")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt is not UTF-8 text: {error}.") from error
