"""Hooks of the documentation site: what its pages link to outside ``docs/`` becomes part of it.

Pages name sources, results and figures by paths relative to themselves, as a code host needs them.
On the site there is no repository to look into, so each file that is linked to gets a page of its
own under ``source/``; figures and data are copied there. Nothing is written into ``docs/``.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(?=[)#])")
COPIED = {".gif", ".jpg", ".json", ".png", ".svg"}
LANGUAGES = {".cff": "yaml", ".cpp": "cpp", ".cu": "cuda", ".h": "cpp", ".py": "python"}

# Pages of the site that are files of the repository.
RENAMED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
}

_homes: dict[str, str] = {}


def home(src_uri: str) -> str:
    """Where a page of the site lives in the repository."""
    return _homes.get(src_uri, f"docs/{src_uri}")


def uri(path: str) -> str:
    """Where a file or folder of the repository is on the site."""
    if path in RENAMED:
        return RENAMED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    ending = "" if Path(path).suffix in COPIED | {".md"} else ".md"
    return f"source/{path}{ending}"


def resolve(link: str, source: str) -> str | None:
    """The path in the repository that a link in the file ``source`` means, if there is one."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def rewrite(text: str, source: str, target: str) -> str:
    """Text of the file ``source`` with its links as the page ``target`` of the site needs them."""

    def relative(match: re.Match[str]) -> str:
        path = resolve(match[1], source)
        if path is None:
            return match[1]
        return posixpath.relpath(uri(path), posixpath.dirname(target) or ".")

    return LINK.sub(relative, text)


def contents(path: str) -> str:
    """The page of a file or folder that is no page by itself."""
    found = ROOT / path
    # Whoever searches wants the page about a subject, not a line of code or of history.
    wanted = "boost: 0.3" if path in RENAMED else "exclude: true"
    head = f"---\nsearch:\n  {wanted}\n---\n\n"
    if found.suffix == ".md":
        return head + found.read_text()
    if found.is_dir():
        names = sorted(p.name + "/" * p.is_dir() for p in found.iterdir() if p.name[0] not in "._")
        return f"{head}# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    language = LANGUAGES.get(found.suffix, "text")
    return f"{head}# {path}\n\n````{language}\n{found.read_text()}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to, and what that links to in turn."""
    _homes.clear()
    waiting = ["CHANGELOG.md", "CONTRIBUTING.md"]
    for page in files.documentation_pages():
        waiting += linked(page.content_string, home(page.src_uri))
    while waiting:
        path = waiting.pop()
        target = uri(path)
        if files.get_file_from_path(target) is not None:
            continue
        if target.endswith(".md"):
            text = contents(path)
            _homes[target] = path
            files.append(File.generated(config, target, content=text))
            waiting += linked(text, path) if path.endswith(".md") else []
        else:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
    return files


def linked(text: str, source: str) -> list[str]:
    """Paths in the repository that a text links to."""
    found = (resolve(match[1], source) for match in LINK.finditer(text))
    return [path for path in found if path is not None]


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point the links of a page to the pages of the site."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # a section of one page: its column would be empty
    source = home(page.file.src_uri)
    if source.endswith(".md"):
        return rewrite(markdown, source, page.file.src_uri)
    return markdown
