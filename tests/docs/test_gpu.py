"""The tables of docs/gpu.md are those of the commands that it names."""

import pytest

from kalman_attention.cli.verbs.check import ARCHITECTURES
from kalman_attention.tools import roofline
from kalman_attention.tools.engines import GPU_ENGINES
from tests.docs.markdown import ROOT, table_rows
from tests.interpreter import INTERPRETING

ROWS = table_rows((ROOT / "docs" / "gpu.md").read_text())
RESOURCES = [row for row in ROWS if row[0] in GPU_ENGINES]


def test_the_roofline_is_what_the_function_says() -> None:
    assert [row for row in ROWS if row not in RESOURCES] == list(roofline.table())


def test_the_resources_are_of_all_variants_and_none_spills() -> None:
    pytest.importorskip("triton")
    if INTERPRETING:
        pytest.skip("nothing is compiled while Triton interprets")
    from kalman_attention.tools.triton_resources import variants

    listed = [row for row in RESOURCES if row[0] == "triton"]
    assert [row[1:3] for row in listed] == [[v.kernel.__name__, str(v)] for v in variants()]
    assert {row[3] for row in listed} == {" / ".join(ARCHITECTURES)}
    assert {row[5] for row in listed} == {"0 / 0 / 0"}
