"""``docs/equations.md``: complete, and every name in it exists."""

import ast
import functools
from pathlib import Path

import pytest

from tests.docs.markdown import PACKAGE, ROOT, code, table_rows

ROWS = table_rows((ROOT / "docs" / "equations.md").read_text())

# In the order of the paper; None where an equation has a number but no label.
EQUATION_LABELS = [
    "eq:ssm-ct", "eq:mamba-rec", None, "eq:gla-rec", "eq:lgssm_dyn", "eq:lgssm_obs", "eq:ssm_dyn",
    "eq:discretisation", "eq:ssm_obs", "eq:readout_model", "eq:readout", "eq:gen_dyn_qkv",
    "eq:gen_obs_qkv", "eq:gen_readout_qkv", None, "eq:mobius_main", None, "eq:lambda_gate_view",
    "eq:mu-update", "eq:mu-delta", "eq:kla-ridge", "eq:kla-prec-mat", "eq:kla-mean-mat",
    "eq:nmll_integral", "eq:nmll_logsumexp",
]  # fmt: skip
STATEMENTS = {
    "Th:Mobius": "Theorem 1",
    "cor:parallel-scan": "Corollary",
    "thm:eta-affine": "Theorem 2",
    "cor:mean-parallel-scan": "Corollary",
    "cor:moment-form": "Corollary",
    "thm:conv-form": "Theorem 3",
    "alg:kla": "Algorithm 1",
}


@functools.cache
def definitions(path: Path) -> set[str]:
    """Functions, classes and methods (``Class.method``) that a file defines."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
            names.update(f"{node.name}.{method.name}" for method in methods)
    return names


def test_every_equation_is_listed_once():
    numbered = [row for row in ROWS if row[0].startswith("Eq. ")]
    assert [row[0] for row in numbered] == [f"Eq. {i}" for i in range(1, 26)]
    labels = [[label] if label else [] for label in EQUATION_LABELS]
    assert [code(row[1]) for row in numbered] == labels


def test_every_theorem_corollary_and_algorithm_is_listed():
    listed = {label: row[0] for row in ROWS for label in code(row[1])}
    assert {label: listed.get(label) for label in STATEMENTS} == STATEMENTS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_functions_and_tests_exist(row):
    _, _, meaning, functions, tests = row
    assert meaning
    if functions == "background":
        assert tests == ""
        return
    assert code(functions), "a row names a function, or is background"
    assert code(tests), "a row that names a function names a test"
    for name in code(functions):
        path, _, function = name.partition("::")
        assert function in definitions(PACKAGE / path), name
    for name in code(tests):
        path, _, function = name.partition("::")
        assert path.startswith("tests/"), name
        assert function.startswith("test_"), name
        assert function in definitions(ROOT / path), name
