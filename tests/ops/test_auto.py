"""What ``auto`` means, with and without the native library."""

import warnings

import pytest
import torch

from kalman_attention import kla_scan
from kalman_attention.ops import engines
from kalman_attention.ops.cpu import library
from kalman_attention.ops.selfcheck import Case, make_call

CPU = torch.device("cpu")


def test_auto_on_cpu_is_the_native_engine_when_it_was_built() -> None:
    if library.why_not() is not None:
        pytest.skip(library.why_not() or "")
    assert engines.resolve("auto", CPU, torch.float32) == "cpu"
    assert library.info().isa in library.info().isas


def test_auto_elsewhere_is_plain_torch() -> None:
    assert engines.resolve("auto", torch.device("meta"), torch.float32) == "associative"


def test_without_the_library_a_call_works_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "_kla_cpu.so")
    library._open.cache_clear()
    engines._warn_slow.cache_clear()
    args = [x.float() for x in make_call(Case(B=1, T=5, N=2, D=3)).tensors[:6]]
    try:
        with pytest.warns(UserWarning, match=r"slow torch engine.*a C\+\+17 compiler"):
            out = kla_scan(*args)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = kla_scan(*args)
        with pytest.raises(ValueError, match=r"'cpu' cannot serve .*'associative' can"):
            kla_scan(*args, engine="cpu")
    finally:
        monkeypatch.undo()
        library._open.cache_clear()
        engines._warn_slow.cache_clear()
    assert torch.equal(out.y, again.y)
    torch.testing.assert_close(out.y, kla_scan(*args).y)


def test_a_broken_library_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    broken = tmp_path / "_kla_cpu.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(library, "LIBRARY", broken)
    library._open.cache_clear()
    try:
        assert "cannot be opened" in str(library.why_not())
    finally:
        monkeypatch.undo()
        library._open.cache_clear()
