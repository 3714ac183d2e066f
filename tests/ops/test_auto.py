"""What ``auto`` means: engine and arithmetic, with and without the native library."""

import math
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kalman_attention import (
    KLA,
    KLAConfig,
    KLAState,
    kla_scan,
    kla_scan_ref,
    kla_step,
    use_engine,
)
from kalman_attention.ops import engines
from kalman_attention.ops.arithmetic import needed_dtype
from kalman_attention.ops.checks import check_scan
from kalman_attention.ops.cpu import library
from kalman_attention.tools.selfcheck import Case, make_call

CPU = torch.device("cpu")


def test_auto_on_cpu_is_the_native_engine_when_it_was_built() -> None:
    if library.why_not() is not None:
        pytest.skip(library.why_not() or "")
    assert engines.resolve("auto", CPU, torch.float32) == "cpu"
    assert library.info().isa in library.info().isas


def test_auto_elsewhere_is_plain_torch() -> None:
    meta = torch.device("meta")
    assert engines.resolve("auto", meta, torch.float32) == "associative"
    assert engines.resolve("auto", meta, torch.float32, slots=4) == "associative"
    assert engines.resolve("auto", meta, torch.float32, slots=8) == "matrix"


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
        assert re.search(r"was not built.*put a C\+\+17 compiler", str(library.why_not()))
        path.write_bytes(b"not a library")
        library._open.cache_clear()
        assert "cannot be opened" in str(library.why_not())
    finally:
        monkeypatch.undo()
        library._open.cache_clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines that were loaded by calls."""
    found: list[str] = []
    for name in ("load", "load_step"):
        load = getattr(engines.Engine, name)

        def note(engine: engines.Engine, load: Any = load) -> Any:
            found.append(engine.name)
            return load(engine)

        monkeypatch.setattr(engines.Engine, name, note)
    return found


def test_use_engine_decides_what_auto_means(asked: list[str]) -> None:
    args = [x.float() for x in make_call(Case(B=1, T=5, N=2, D=3)).tensors]
    state, usual = KLAState(*args[6:]), engines.resolve("auto", CPU, torch.float32)
    with use_engine("associative"):
        kla_scan(*args[:6])
        kla_step(*(x[:, 0] for x in args[:4]), *args[4:6], state)
        kla_scan(*args[:6], engine="mobius")
        with use_engine("mobius"):
            kla_scan(*args[:6])
        kla_scan(*args[:6])
    assert asked == ["associative", "associative", "mobius", "mobius", "associative"]
    assert engines.resolve("auto", CPU, torch.float32) == usual
    with pytest.raises(ValueError, match="unknown engine 'cud'"), use_engine("cud"):
        pass


def test_use_engine_reaches_layers_and_compiled_graphs(asked: list[str]) -> None:
    layer, x = KLA(KLAConfig(d_model=4, d_state=2)), torch.randn(1, 3, 4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for name in ("associative", "mobius"):
        asked.clear()
        with use_engine(name), torch.no_grad():
            layer(x)
            compiled(x)
        assert asked == [name, name]


def test_a_layer_runs_the_engine_of_its_options(asked: list[str]) -> None:
    layer = KLA(KLAConfig(d_model=4, d_state=2, engine="associative"))
    with torch.no_grad():
        state = layer.mix(torch.randn(1, 3, 4)).state
        layer.step(torch.randn(1, 4), state)
    assert asked == ["associative", "associative"]
    with pytest.raises(ValueError, match="engine must be one of None, 'auto'"):
        KLAConfig(d_model=4, engine="cud")


def endless(T: int) -> list[torch.Tensor]:
    tensors = [x.float() for x in make_call(Case(B=1, T=T, N=1, D=2)).tensors[:6]]
    tensors[4].fill_(1.0)
    tensors[5].fill_(0.0)
    return tensors


def test_the_arithmetic_is_decided_once_and_carried_along() -> None:
    args = endless(4097)
    assert check_scan(*args, None, None, None).acc_dtype == torch.float64
    short = [*(x[:, :4096] for x in args[:4]), *args[4:]]
    assert check_scan(*short, None, None, None).acc_dtype == torch.float32
    asked = check_scan(*args, None, None, None, torch.float32)
    assert asked.acc_dtype == torch.float32
    silent = [*args[:3], torch.zeros_like(args[3]), *args[4:]]
    assert check_scan(*silent, None, None, None).acc_dtype == torch.float64


# Gaps of 1/10,000 make 10,000 tokens of one unit of time, and steps that float32 cannot see.
@pytest.mark.parametrize(("T", "gap", "a_bar"), [(4097, 1e-4, 0.9), (129, 1e-4, 0.9999)])
def test_short_gaps_make_a_long_memory(T: int, gap: float, a_bar: float) -> None:
    q, k, v, lam_v, a, p = endless(T)
    dynamics, rest = (a.fill_(a_bar), p.fill_(1e-3)), (None, None, None, None)
    for dt, wanted in ((gap, torch.float64), (1.0, torch.float32)):
        gaps = torch.full((1, T), dt)
        assert check_scan(q, k, v, lam_v, *dynamics, *rest, gaps).acc_dtype == wanted


def test_noise_ends_no_memory_without_evidence() -> None:
    q, k, v, lam_v, a, p = endless(2000)
    for scale, wanted in ((1e-4, torch.float64), (1.0, torch.float32)):
        args = (q, k, v, scale * lam_v, a, p.fill_(1e-5), None, None, None)
        assert check_scan(*args).acc_dtype == wanted


@pytest.mark.parametrize("hole", [False, True])
def test_means_that_dwarf_the_values(hole: bool) -> None:
    q, k, v, lam_v, a, p = endless(70)
    if hole:
        v[0, 0, 0] = math.nan
    lam_v.requires_grad_()
    for mean, wanted in ((1e5, torch.float64), (10.0, torch.float32)):
        state = KLAState(torch.full((1, 1, 2), mean), torch.ones(1, 1, 2))
        args = (q, k, v, lam_v, a, p, state, None, None)
        assert check_scan(*args).acc_dtype == wanted
        with torch.no_grad():  # nothing else suffers
            assert check_scan(*args).acc_dtype == torch.float32
    noisy = (q, k, v, lam_v, a, p.fill_(0.1), state._replace(mean=1e5 * state.mean), None, None)
    assert check_scan(*noisy).acc_dtype == torch.float32
    at_once = torch.zeros(1, 70)  # no noise comes without time
    assert check_scan(*noisy, None, at_once).acc_dtype == torch.float64


def test_values_on_a_device_are_not_looked_at() -> None:
    inputs = check_scan(*endless(4097), None, None, None)
    there = inputs._replace(**{n: getattr(inputs, n).to("meta") for n in inputs._fields[:8]})
    assert (
        needed_dtype(there, gradients=True) == torch.float32
    )  # a look at meta tensors would raise


@pytest.mark.parametrize("engine", ["reference", "cpu", "associative"])
def test_longer_arithmetic_on_request(engine: str) -> None:
    args = [x.float() for x in make_call(Case(B=2, T=100, N=3, D=4)).tensors[:6]]
    exact = kla_scan_ref(*(x.double() for x in args), return_variance=True)
    options = {"return_variance": True, "engine": engine}
    wide = kla_scan(*args, acc_dtype=torch.float64, **options)
    plain = kla_scan(*args, **options)
    assert wide.y.dtype == wide.state.mean.dtype == torch.float32
    assert torch.equal(wide.y, exact.y.float())
    assert not torch.equal(plain.y, wide.y)


@pytest.mark.parametrize(
    ("dtype", "acc_dtype", "message"),
    [
        (torch.float32, torch.bfloat16, "must be torch.float32 or torch.float64"),
        (torch.float64, torch.float32, "whose digits it would drop"),
    ],
)
def test_shorter_arithmetic_is_refused(
    dtype: torch.dtype, acc_dtype: torch.dtype, message: str
) -> None:
    args = [x.to(dtype) for x in make_call(Case(B=1, T=5, N=2, D=3)).tensors[:6]]
    with pytest.raises(ValueError, match=message):
        kla_scan(*args, acc_dtype=acc_dtype)


def test_a_compiled_graph_settles_the_arithmetic_when_it_runs() -> None:
    args = endless(4200)
    compiled = torch.compile(kla_scan, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args).state.variance, kla_scan(*args).state.variance)
