"""Just enough markdown for the tests of the docs."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "kalman_attention"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "dev").glob("*.md")),
]


def name_of(page: Path) -> str:
    """A page as tests are named after it."""
    return page.relative_to(ROOT).as_posix()


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


def blocks(text: str, language: str = "") -> list[str]:
    """The fenced blocks of a language; those of none are commands and what they print."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """The lines of all blocks that call ``kla``, without comments."""
    lines = (line for block in blocks(text) for line in block.splitlines())
    bare = (line.split(" #")[0].removeprefix("$ ").strip() for line in lines)
    return [line for line in bare if line.startswith("kla ")]


def prose(text: str) -> str:
    """A page without its blocks and without what stands in backticks."""
    text = re.sub(r"^(`{3,})\w*\n.*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def links(text: str) -> list[str]:
    """Targets of all links and pictures that name no other site."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """Where a link into a page may lead: its headings, and what it documents."""
    text = re.sub(r"^(`{3,})\w*\n.*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    seen: Counter[str] = Counter()
    found = set(re.findall(r"^::: (\S+)", text, re.MULTILINE))
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(slug if seen[slug] == 0 else f"{slug}-{seen[slug]}")
        seen[slug] += 1
    return found
