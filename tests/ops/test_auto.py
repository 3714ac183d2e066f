"""What ``auto`` means, with and without the native library."""

import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kalman_attention import kla_scan
from kalman_attention.ops import engines
from kalman_attention.ops.cpu import library
from kalman_attention.tools.selfcheck import Case, make_call

CPU = torch.device("cpu")


def test_auto_on_cpu_is_the_native_engine_when_it_was_built() -> None:
    if library.why_not() is not None:
        pytest.skip(library.why_not() or "")
    assert engines.resolve("auto", CPU, torch.float32) == "cpu"
    assert library.info().isa in library.info().isas


def test_auto_elsewhere_is_plain_torch() -> None:
    assert engines.resolve("auto", torch.device("meta"), torch.float32) == "associative"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_leaves_alone_what_never_ran_on_a_device(device: str) -> None:
    assert engines.resolve("auto", torch.device(device), torch.float32) != "cuda"


def test_without_the_library_a_call_works_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = replace(engines.ENGINES["cpu"], missing="the library was not built; do this")
    monkeypatch.setitem(engines.ENGINES, "cpu", missing)
    engines._warn_slow.cache_clear()
    args = [x.float() for x in make_call(Case(B=1, T=5, N=2, D=3)).tensors[:6]]
    try:
        with pytest.warns(UserWarning, match="slow torch engine.*was not built; do this"):
            out = kla_scan(*args)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = kla_scan(*args)
        with pytest.raises(ValueError, match=r"'cpu' cannot serve .*'associative' can"):
            kla_scan(*args, engine="cpu")
    finally:
        monkeypatch.undo()
        engines._warn_slow.cache_clear()
    assert torch.equal(out.y, again.y)
    torch.testing.assert_close(out.y, kla_scan(*args).y)


def test_a_missing_or_broken_library_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library._open.cache_clear()
    path = tmp_path / "_kla_cpu.so"
    monkeypatch.setattr(library, "LIBRARY", path)
    try:
        assert re.search(r"was not built.*with a C\+\+17 compiler", str(library.why_not()))
        path.write_bytes(b"not a library")
        library._open.cache_clear()
        assert "cannot be opened" in str(library.why_not())
    finally:
        monkeypatch.undo()
        library._open.cache_clear()
