"""Text for messages: suggestions for misspelt names, and text that is safe on a terminal."""

import difflib
import unicodedata
from collections.abc import Iterable


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """A message about an unknown name, with the nearest known one.

    >>> unknown("task", "recal", ["recall", "mqar"])
    "unknown task 'recal': did you mean 'recall'? Known: recall, mqar."

    Args:
        kind: kind of thing that is named.
        name: the unknown name.
        known: all known names.
    """
    names = list(known)
    near = nearest(name, names)
    hint = f": did you mean {near!r}?" if near else "."
    return f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to ``name``, or None if none is similar."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def visible(text: str) -> str:
    r"""Escape control characters, so that none of them reaches a terminal.

    Terminals execute control sequences: text from a model or a file could move the cursor, change
    the title or hide other output. Newlines and tabs are kept.

    >>> visible("\x1b[2J is\tharmless\r\n")
    '\\x1b[2J is\tharmless\\x0d\n'
    """
    return "".join(
        f"\\x{ord(c):02x}" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c
        for c in text
    )
