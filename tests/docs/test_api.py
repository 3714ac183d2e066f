"""The API reference is complete: every public name, and every name that a page imports."""

import ast
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest

import kalman_attention
from kalman_attention import series, train
from tests.docs.markdown import PAGES, ROOT, blocks, code, name_of

LISTED = [
    name
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
]


def imports(page_text: str) -> Iterator[str]:
    """Dotted names that the Python blocks of a page import from the package."""
    for block in blocks(page_text, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "kalman_attention"
            ):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def mentions(page_text: str) -> Iterator[str]:
    """Names in a sentence that lead from the package to a function or class."""
    for name in code(page_text):
        dotted = re.fullmatch(r"(?:\w+\.)+\w+", name)
        if dotted and isinstance(find(f"kalman_attention.{name}"), type | type(find)):
            yield f"kalman_attention.{name}"


def find(dotted: str) -> object:
    """What a dotted name means, or None."""
    module, _, name = dotted.rpartition(".")
    try:
        if find_spec(dotted) is not None:
            return importlib.import_module(dotted)
    except ModuleNotFoundError:  # what is before the last dot is no package
        pass
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None


def public(module: ModuleType) -> set[str]:
    names = (n for n in vars(module) if not n.startswith("_"))
    found = {n for n in names if not isinstance(getattr(module, n), ModuleType)}
    return {f"{module.__name__}.{n}" for n in found}


def test_every_public_name_is_documented() -> None:
    exported = {f"kalman_attention.{name}" for name in kalman_attention.__all__}
    assert exported | public(train) | public(series) <= set(LISTED)


def test_nothing_is_documented_twice() -> None:
    assert sorted(set(LISTED)) == sorted(LISTED)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_names_is_documented(page) -> None:
    pytest.importorskip("transformers")
    text = page.read_text()
    listed = [find(name) for name in LISTED]
    missing = {n for n in (*imports(text), *mentions(text)) if find(n) not in listed}
    assert not missing


@pytest.mark.parametrize("name", LISTED)
def test_what_is_documented_exists(name: str) -> None:
    if name.startswith("kalman_attention.hf"):
        pytest.importorskip("transformers")
    if name.startswith("kalman_attention.data"):
        pytest.importorskip("tokenizers")
    assert getattr(find(name), "__doc__", None)
