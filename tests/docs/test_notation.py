"""``docs/notation.md``: every letter that a reader meets is in the glossary, once."""

import ast
import inspect
from collections import Counter
from collections.abc import Iterator

import pytest

import kalman_attention
from tests.docs.markdown import PACKAGE, ROOT, code, table_rows

TEXT = (ROOT / "docs" / "notation.md").read_text()
GLOSSARY = set(code(TEXT))
OPS = sorted(path for path in (PACKAGE / "ops").rglob("*.py") if path.parent.name != "cuda")
ENDINGS = ("_0", "_new", "_t", "_n", "_g", "_d", "_sb", "_st", "_sd")
GREEK = {"alpha", "beta", "gamma", "delta", "eta", "lam", "mu", "phi", "rho", "sigma", "theta"}


def public_arguments(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Pairs (function, argument) of all public functions and methods under a syntax node."""
    for item in ast.iter_child_nodes(node):
        if isinstance(item, ast.ClassDef) and not item.name.startswith("_"):
            yield from public_arguments(item)
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            arguments = item.args.posonlyargs + item.args.args + item.args.kwonlyargs
            yield from ((item.name, argument.arg) for argument in arguments)


@pytest.mark.parametrize("path", sorted((PACKAGE / "filtering").glob("*.py")), ids=lambda p: p.stem)
def test_arguments_in_filtering_are_in_the_glossary(path):
    pairs = public_arguments(ast.parse(path.read_text()))
    unknown = [pair for pair in pairs if pair[1] not in GLOSSARY | {"self", "cls"}]
    assert not unknown, "(function, argument) missing in docs/notation.md"


def is_letter(name: str) -> bool:
    """Whether a name is in the register of letters: a part of it is short, or Greek."""
    return any(len(part) <= 2 or part in GREEK for part in name.split("_"))


def is_known(letter: str) -> bool:
    """Rule 6: endings, tiles of a kernel and a gradient need no row of their own."""
    bare = letter.removeprefix("BLOCK_").removeprefix("has_").removeprefix("keep_")
    for ending in ENDINGS:
        bare = bare.removesuffix(ending)
    return bare in GLOSSARY or bare.removeprefix("d") in GLOSSARY


@pytest.mark.parametrize("path", OPS, ids=lambda p: p.stem)
def test_letters_in_ops_are_in_the_glossary(path):
    pairs = public_arguments(ast.parse(path.read_text()))
    unknown = [pair for pair in pairs if is_letter(pair[1]) and not is_known(pair[1])]
    assert not unknown, "(function, letter) missing in docs/notation.md"


def exported_from(folder: str) -> list[str]:
    return [
        name
        for name in kalman_attention.__all__
        if getattr(kalman_attention, name).__module__.startswith(f"kalman_attention.{folder}")
    ]


@pytest.mark.parametrize("name", exported_from("ops"))
def test_arguments_of_exported_ops_are_in_the_glossary(name):
    arguments = inspect.signature(getattr(kalman_attention, name)).parameters
    assert set(arguments) <= GLOSSARY


def test_exported_ops_are_found():
    assert {"kla_scan", "kla_step", "kla_scan_ref"} <= set(exported_from("ops"))


def test_one_letter_has_one_meaning():
    symbols = TEXT.split("## Words")[0]
    letters = Counter(letter for row in table_rows(symbols) for letter in code(row[1]))
    assert letters["lam_v"] == 1
    assert not [letter for letter, count in letters.items() if count > 1]
