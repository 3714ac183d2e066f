"""One self-contained HTML page: verdicts, sortable tables, charts that show their values."""

import base64
import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from kalman_attention._files import write_atomically
from kalman_attention._reading import read_bytes
from kalman_attention._tables import Table
from kalman_attention.published import in_print
from kalman_attention.recipes.machine import about
from kalman_attention.report.charts import Chart, proper_name

TEMPLATES = Path(__file__).parent / "templates"
_MOST_BYTES = 64 << 20  # of an image: the page holds all of them
_KINDS = {".svg": "image/svg+xml", ".png": "image/png"}
_FEW_ROWS = 4  # tables this short are not collapsed
_FEW_TABLES = 4  # sections with more of them begin with their charts
_ORDER = ("confirmed", "refuted", "open")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on a claim of the paper.

    Attributes:
        claim: the claim, in one sentence.
        verdict: whether it holds.
        scale: the scale of the experiments.
        evidence: what was measured.
        paper: where the paper makes the claim, as a LaTeX label.
        experiments: names of the sections that show the evidence.
    """

    claim: str
    verdict: Literal["confirmed", "refuted", "open"]
    scale: str
    evidence: str
    paper: str
    experiments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        name: its name in verdicts.
        title: its heading, also in the table of contents.
        text: a paragraph below the heading.
        source: where it is in the paper, as a LaTeX label; None if it is not in the paper.
        scale: the scale of the experiment, if it has several.
        command: the command that computes it.
        done: number of finished runs, and of all runs.
        tables: tables, shown after the charts.
        charts: charts drawn from numbers.
        images: image files to embed in the page, each with a caption.
    """

    name: str
    title: str
    text: str = ""
    source: str | None = None
    scale: str = ""
    command: str = ""
    done: tuple[int, int] | None = None
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    images: Sequence[tuple[Path, str]] = ()

    @property
    def anchor(self) -> str:
        """The target of links to it."""
        text = f"{self.name}-{self.scale}" if self.scale else self.name
        return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")

    @cached_property
    def notes(self) -> list[str]:
        """Notes that all its tables share, to be shown once."""
        first, *others = self.tables or [Table("", [], [])]
        said = [note for note in first.notes if all(note in table.notes for table in others)]
        return [note for note in said if note != f"scale {self.scale}"]

    @property
    def shown(self) -> list["Shown"]:
        """Its tables, ready for the template."""
        hidden = (*self.notes, f"scale {self.scale}")
        return [
            Shown(
                table,
                f"{self.anchor}-{i}",
                [note for note in table.notes if note not in hidden],
                i == 1 and len(self.tables) <= _FEW_TABLES,
            )
            for i, table in enumerate(self.tables, 1)
        ]

    @property
    def pictures(self) -> list[tuple[str, str]]:
        """Its images as data URLs, with captions.

        They are embedded as images: a script inside an SVG file does not run there.
        """
        return [(_data(path), caption) for path, caption in self.images]


class Cell(NamedTuple):
    """A cell of a table on the page.

    Attributes:
        text: the measured value.
        aside: text in brackets after it, such as the paper's figure.
        key: sort key; empty ones are sorted to the end.
    """

    text: str
    aside: str
    key: str


class Shown(NamedTuple):
    """A table on the page.

    Attributes:
        table: the table.
        anchor: anchor of its title.
        notes: notes that only this table has.
        first: whether it is the first in its section; others are collapsed, unless they are short.
    """

    table: Table
    anchor: str
    notes: list[str]
    first: bool

    @property
    def open(self) -> bool:
        """Whether it is initially open."""
        return self.first or len(self.table.rows) <= _FEW_ROWS

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers and are right-aligned."""
        columns = zip(*self.table.rows, strict=True) if self.table.rows else []
        found = [all(map(_countable, column)) for column in columns]
        return found or [False] * len(self.table.header)

    @property
    def rows(self) -> list[tuple[bool, list[Cell]]]:
        """Cells, and whether the row is about KLA while others are not."""
        header, rows = self.table.header, self.table.rows
        models = header.index("model") if "model" in header else 0
        own = ["kla" in row[models].lower() and row[0] != "paper" for row in rows]
        kinds = ["model" if i == models else "number" * x for i, x in enumerate(self.numeric)]
        return [
            (mine and not all(own), [_cell(*pair) for pair in zip(row, kinds, strict=True)])
            for mine, row in zip(own, rows, strict=True)
        ]


def _number(text: str) -> str | None:
    """The first number of a cell, if it begins with one; just above it for "> 4"."""
    found = re.match(r"([<>]?)\s*([+-]?\d[\d,]*\.?\d*(?:e[+-]?\d+)?)", text)
    if found is None:
        return None
    value = float(found[2].replace(",", ""))
    return f"{value + {'<': -1e-6, '>': 1e-6}.get(found[1], 0.0):.12g}"


def _countable(text: str) -> bool:
    return _missing(text) or _number(text) is not None


def _missing(text: str) -> bool:
    return text == "" or text.startswith("- ") or text == "-"


def _cell(text: str, kind: str) -> Cell:
    numeric = kind == "number"
    found = re.fullmatch(r"([^()]+) (\([^()]+\))", text) if numeric else None
    shown, aside = (found[1], found[2]) if found else (text, "")
    if kind == "model":
        shown = proper_name(text)
    key = "" if _missing(text) else (_number(text) if numeric else shown.lower()) or ""
    return Cell(re.sub(r"(?<!\S)-(?!\S)", "\N{EN DASH}", shown), aside, key)


def _data(path: Path) -> str:
    encoded = base64.b64encode(read_bytes(path, _MOST_BYTES)).decode()
    return f"data:{_KINDS[path.suffix]};base64,{encoded}"


def check_inside(path: Path, root: Path) -> None:
    """Reject a link that leads out of a folder: the page may be shared, other files may not."""
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    if not real.is_relative_to(home):
        raise ValueError(
            f"{path} leads out of {root}, to {real}. A report shows only what is in its folder: "
            "copy it there, or remove the link."
        )


def render_page(
    title: str, lead: str, sections: Sequence[Section], verdicts: Sequence[Verdict] = ()
) -> str:
    """The whole page.

    Args:
        title: its heading.
        lead: introduction.
        sections: its sections.
        verdicts: verdicts, shown above the sections.
    """
    import jinja2
    from markupsafe import Markup

    # File names, cell labels and text in results may contain anything: all of it is escaped.
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(in_print=in_print, proper_name=proper_name)
    style, script = ((TEMPLATES / name).read_text("utf-8") for name in ("page.css", "page.js"))
    return templates.get_template("page.html").render(
        title=title,
        lead=lead,
        facts=about(),
        sections=sections,
        anchors={section.name: section.anchor for section in reversed(sections)},
        titles={section.name: section.title for section in reversed(sections)},
        verdicts=sorted(verdicts, key=lambda verdict: _ORDER.index(verdict.verdict)),
        order=_ORDER,
        counts=Counter(verdict.verdict for verdict in verdicts),
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def write_page(
    path: Path, lead: str, sections: Sequence[Section], verdicts: Sequence[Verdict] = ()
) -> None:
    """Write the page, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page = render_page("Kalman linear attention", lead, sections, verdicts)
    write_atomically(path, page.encode())
