r"""Docstrings as the site shows them: formulas, tables and sessions of the interpreter.

Sources are read in editors, where ``.. math::`` with LaTeX, a table of equals signs and ``>>>`` are
at their best. Markdown knows none of them. Formulas become MathML, which browsers draw by
themselves: no script, and no fonts from a network.
"""

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

FORMULA = re.compile(r"^( *)\.\. math::(.*\n?(?:\1 +\S.*\n?)*)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
SESSION = re.compile(r"^( *)>>> .*\n?(?:\1\S.*\n?)*", re.MULTILINE)
TABLE = re.compile(r"^(=+) +=+\n((?:.+\n)+?)=+ +=+$", re.MULTILINE)


def markdown(text: str) -> str:
    """A docstring in Markdown."""
    text = TABLE.sub(lambda m: _table(m[2], len(m[1])), text)
    text = SESSION.sub(lambda m: f"{m[1]}```pycon\n{m[0].rstrip()}\n{m[1]}```\n", text)
    text = FORMULA.sub(lambda m: f"{m[1]}<div>{mathml(m[2], 'block')}</div>\n", text)
    return INLINE.sub(lambda m: f"<span>{mathml(m[1], 'inline')}</span>", text)


def mathml(latex: str, display: Any) -> str:
    """A formula on one line, whatever its source."""
    return convert(" ".join(latex.split()), display=display)


def _table(rows: str, width: int) -> str:
    cells = ((row[:width].strip(), row[width:].strip()) for row in rows.splitlines())
    return "\n".join(["| | |", "|---|---|", *(f"| {left} | {right} |" for left, right in cells)])


class Docstrings(griffe.Extension):
    """Rewrites every docstring that has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called once for each object of the package."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
