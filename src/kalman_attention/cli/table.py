"""Plain-text tables: columns aligned, numbers to the right."""

from collections.abc import Sequence

from kalman_attention.recipes.table import Table


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
    """A table for the terminal."""
    print(f"\n{table.title}\n")
    print(render(table.header, table.rows))
    for note in table.notes:
        print(f"- {note}")
