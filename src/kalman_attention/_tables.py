"""Tables of text with notes, for terminals and in Markdown."""

from collections.abc import Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """A table, ready to be shown in a terminal, in Markdown or on a page.

    Attributes:
        title: title of the table.
        header: names of the columns.
        rows: rows of cells, one per column.
        notes: notes below the table: scale, changes of the protocol, how a number was chosen.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def markdown(table: Table) -> str:
    """The table as Markdown, with its title as a third-level heading."""
    lines = [f"### {table.title}", "", markdown_rows(table.header, table.rows), ""]
    return "\n".join([*lines, *(f"- {note}" for note in table.notes)]).rstrip() + "\n"


def markdown_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Header and rows as Markdown, without title and notes."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def percent(value: float | None, published: float | str | None = None) -> str:
    """An accuracy between 0 and 1 in percent, followed by the paper's figure in brackets."""
    ours = "-" if value is None else f"{100 * value:.1f}"
    if published is None:
        return ours
    theirs = published if isinstance(published, str) else f"{published:.1f}"
    return f"{ours} ({theirs})"


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows of text under a header.

    Args:
        header: names of the columns.
        rows: cells as text, as many per row as there are names.

    Returns:
        The table, one line per row.
    """
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [all(_numeric(cell) for cell in column[1:]) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(cells, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def _numeric(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("", "-") or (cell[:1] in "+-<>" and cell[1:2].isdigit())


def print_table(table: Table) -> None:
    """Print a table to the terminal."""
    print(f"\n{table.title}\n")
    print(render(table.header, table.rows))
    for note in table.notes:
        print(f"- {note}")
