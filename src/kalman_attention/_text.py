"""Texts for people: names that were probably meant, and text that is safe to show on a terminal."""

import difflib
import unicodedata
from collections.abc import Iterable


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """A message about an unknown name, with the nearest known one.

    >>> unknown("task", "recal", ["recall", "mqar"])
    "unknown task 'recal': did you mean 'recall'? Known: recall, mqar."

    Args:
        kind: what the name is of.
        name: as it was given.
        known: all names that there are.
    """
    names = list(known)
    near = nearest(name, names)
    hint = f": did you mean {near!r}?" if near else "."
    return f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like ``name``, or None if none is like it."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def visible(text: str) -> str:
    r"""Text with control characters written out, so that none of them reaches a terminal.

    Terminals obey control sequences: text from a model or a file could move the cursor, change the
    title or hide what stands before it. Newlines and tabs stay.

    >>> visible("\x1b[2J is\tharmless\r\n")
    '\\x1b[2J is\tharmless\\x0d\n'
    """
    return "".join(
        f"\\x{ord(c):02x}" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c
        for c in text
    )
