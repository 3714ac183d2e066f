"""Just enough markdown for the tests of the docs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "kalman_attention"


def table_rows(text: str) -> list[list[str]]:
    """Cells of every row of every table, without head and rule."""
    lines = text.splitlines()
    rules = {i for i, line in enumerate(lines) if re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", line)}
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for i, line in enumerate(lines)
        if line.startswith("|") and i not in rules and i + 1 not in rules
    ]


def code(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)
