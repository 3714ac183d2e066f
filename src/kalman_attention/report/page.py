"""One HTML page that needs nothing else: tables as text, figures inside the file."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kalman_attention._reading import read_bytes
from kalman_attention.recipes.table import Table

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --accent: #2563eb; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 1rem; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
nav a { margin-right: 1rem; } a { color: var(--accent); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { text-align: left; background: var(--soft); }
td + td, th + th { text-align: right; }
figure { margin: 1rem 0; } img { max-width: 100%; background: white; border-radius: 4px; }
figcaption, .notes { font-size: .875rem; opacity: .8; }
"""

_MOST_BYTES = 64 << 20
_KINDS = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading; also what the list at the top links to.
        text: a paragraph below the heading.
        tables: shown after it.
        images: files to put into the page, each with a caption.
    """

    title: str
    text: str = ""
    tables: Sequence[Table] = ()
    images: Sequence[tuple[Path, str]] = ()


def render_page(title: str, intro: str, sections: Sequence[Section]) -> str:
    """The whole page."""
    links = "".join(
        f'<a href="#{_anchor(section)}">{_text(section.title)}</a>' for section in sections
    )
    body = "\n".join(_section(section) for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{_text(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{_text(title)}</h1>
<p>{_text(intro)}</p>
<nav>{links}</nav>
{body}
</body>
</html>
"""


def _section(section: Section) -> str:
    parts = [f'<h2 id="{_anchor(section)}">{_text(section.title)}</h2>']
    if section.text:
        parts.append(f"<p>{_text(section.text)}</p>")
    parts += [_table(table) for table in section.tables]
    parts += [_image(path, caption) for path, caption in section.images]
    return "\n".join(parts)


def _table(table: Table) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in table.header)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    notes = "".join(f"<li>{_text(note)}</li>" for note in table.notes)
    return (
        f'<h3>{_text(table.title)}</h3>\n<div class="wide"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f'<ul class="notes">{notes}</ul>'
    )


def _image(path: Path, caption: str) -> str:
    data = base64.b64encode(read_bytes(path, _MOST_BYTES)).decode()
    source = f"data:{_KINDS[path.suffix]};base64,{data}"
    return (
        f'<figure><img alt="{_text(caption)}" src="{source}">'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _anchor(section: Section) -> str:
    return "".join(c if c.isalnum() else "-" for c in section.title.lower())


def _text(text: str) -> str:
    return html.escape(text)
