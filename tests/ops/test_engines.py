"""Every engine against the float64 reference: values and all gradients."""

import itertools
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kalman_attention.ops.engines import ENGINES
from kalman_attention.tools.selfcheck import Case, errors, make_call, misses, run_call
from tests.engines import CPU, EVERY_ENGINE, affordable

AWKWARD = {
    "one of everything": Case(B=1, T=1, N=1, D=1),
    "no tokens": Case(B=2, T=0, N=3, D=4),
    "odd sizes": Case(B=3, T=77, N=5, D=13),
    "wide": Case(B=1, T=70, N=2, D=131),
    "many slots": Case(B=1, T=66, N=67, D=9),
    "slots of a model": Case(B=1, T=65, N=16, D=32),
    "no process noise": Case(B=2, T=200, N=3, D=8, p_max=0.0, a_min=1e-3),
    "strong evidence": Case(B=2, T=130, N=4, D=8, lam_max=1e6),
    "left padding": Case(B=4, T=90, N=4, D=8, padding="left"),
    "right padding": Case(B=4, T=90, N=4, D=8, padding="right"),
    "holes": Case(B=4, T=130, N=4, D=8, padding="random"),
    "packed": Case(B=1, T=200, N=4, D=8, documents=6),
    "more documents than tokens": Case(B=1, T=5, N=2, D=8, documents=9),
    "packed without tokens": Case(B=1, T=0, N=2, D=8, documents=3),
}


def check(engine: str, case: Case, dtype: torch.dtype = torch.float32) -> None:
    call = make_call(case)
    found = errors(run_call(call, engine, dtype), run_call(call, "reference", torch.float64))
    if dtype == torch.float64:
        assert max(found.values(), default=0.0) < 1e-11, found
    else:
        assert not misses(found)


@pytest.mark.parametrize("engine", EVERY_ENGINE)
@pytest.mark.parametrize("case", AWKWARD.values(), ids=AWKWARD.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_awkward_cases(engine: str, case: Case, dtype: torch.dtype) -> None:
    check(engine, case, dtype)


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_every_length_up_to_two_chunks(engine: str) -> None:
    for T in range(0, 131, affordable(13, 1)):
        check(engine, Case(B=2, T=T, N=2, D=3, seed=T))


@pytest.mark.parametrize("engine", EVERY_ENGINE)
@pytest.mark.parametrize("use", [(0,), (1,), (2,), (3,)], ids=["y", "y_var", "mean", "variance"])
def test_gradients_from_each_output_alone(engine: str, use: tuple[int, ...]) -> None:
    call = make_call(Case(B=2, T=75, N=3, D=5, padding="random"))
    truth = run_call(call, "reference", torch.float64, use=use)
    assert not misses(errors(run_call(call, engine, torch.float32, use=use), truth))


@pytest.mark.slow
@pytest.mark.parametrize("engine", EVERY_ENGINE)
@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, T=65_536, N=2, D=4, a_min=1e-3, p_max=0.0),
        Case(B=1, T=65_536, N=2, D=4, a_min=1e-3, lam_max=1e6),
        Case(B=1, T=65_536, N=2, D=4, a_min=1e-3, p_max=1e-4, padding="random"),
    ],
    ids=["no process noise", "strong evidence", "little noise, holes"],
)
def test_long_sequences(engine: str, case: Case) -> None:
    # The reference loop with autograd takes a minute at this length, so the yardstick is another
    # engine in float64, itself held to the reference above. The torch engines share their backward
    # pass: theirs is the native one, and it is theirs in turn.
    call = make_call(replace(case, T=affordable(700, case.T)))
    native = ENGINES["cpu"].why_not(CPU, torch.float64) is None
    yardstick = "cpu" if native and engine != "cpu" else "associative"
    if not native and engine in ("associative", "mobius", "torch_scan"):
        pytest.skip("needs the native library, whose backward pass is other code")
    truth = run_call(call, yardstick, torch.float64)
    assert all(x.isfinite().all() for x in truth.values())
    assert not misses(errors(run_call(call, engine, torch.float32), truth))


@pytest.mark.parametrize("engine", EVERY_ENGINE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_inputs_are_filtered_in_float32(engine: str, dtype: torch.dtype) -> None:
    from kalman_attention import kla_scan

    call = make_call(Case(B=2, T=100, N=4, D=8, lam_max=3.0))
    halves = [x.to(dtype) for x in call.tensors[:4]]
    dynamics = [x.float() for x in call.tensors[4:6]]
    low = [x.requires_grad_() for x in halves]
    high = [x.detach().float().requires_grad_() for x in halves]
    out = kla_scan(*low, *dynamics, return_variance=True, engine=engine)
    exact = kla_scan(*high, *dynamics, return_variance=True, engine="reference")
    assert out.y.dtype == out.y_var.dtype == dtype
    assert out.state.mean.dtype == out.state.variance.dtype == torch.float32
    # Only the rounding of the results to the short type may differ.
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(out.y.float(), exact.y, rtol=unit, atol=unit)
    torch.testing.assert_close(out.state.mean, exact.state.mean, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(out.y.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = torch.autograd.grad(out.y, low, upstream)
    wanted = torch.autograd.grad(exact.y, high, upstream.float())
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g.float(), w, rtol=unit, atol=unit * w.abs().max().item())


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_strided_inputs(engine: str) -> None:
    """Slices cut out of larger tensors, and a transposed layout, give the same bits."""
    from kalman_attention import kla_scan

    call = make_call(Case(B=2, T=70, N=4, D=8))
    plain = [x.float() for x in call.tensors[:6]]
    padded = [torch.nn.functional.pad(x, (3, 2, 1, 4))[..., 1:-4, 3:-2] for x in plain[:4]]
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in plain[:4]]
    columns = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain[:4]]
    expected = kla_scan(*plain, engine=engine)
    for tokens in (padded, turned, columns):
        out = kla_scan(*tokens, *plain[4:], engine=engine)
        assert torch.equal(out.y, expected.y)
        assert torch.equal(out.state.mean, expected.state.mean)


@pytest.mark.parametrize("evidence", [1e3, 1e4])
def test_one_overwhelming_token(evidence) -> None:
    # The figures of docs/engines.md: only d lam_v is outside the contract, and by so much.
    lost = []
    for seed in range(60):
        call = make_call(Case(B=1, T=1, N=1, D=1, a_min=1.0, signed=False, p_max=0.0, seed=seed))
        q, k, v, lam_v, *rest, variance = call.tensors
        tensors = (q, torch.ones_like(k), v, torch.full_like(lam_v, evidence), *rest)
        call = call._replace(tensors=(*tensors, torch.ones_like(variance)))
        reference = run_call(call, "reference", torch.float64)
        found = errors(run_call(call, "cpu", torch.float32), reference)
        lost.append(found.pop("d lam_v"))
        assert not misses(found)
    assert statistics.median(lost) < 1e-7 * evidence
    assert max(lost) < 3e-6 * evidence


@pytest.mark.parametrize("engine", EVERY_ENGINE)
@settings(deadline=None, max_examples=affordable(4, 25))
@given(
    T=st.integers(0, 150),
    N=st.integers(1, 9),
    D=st.integers(1, 20),
    B=st.integers(1, 3),
    log_lam=st.floats(-3, 6),
    p_max=st.sampled_from([0.0, 1e-8, 1e-3, 1.0, 100.0]),
    a_min=st.sampled_from([1e-3, 0.5, 1.0]),
    padding=st.sampled_from(["none", "left", "right", "random", "packed"]),
    seed=st.integers(0, 2**16),
)
def test_any_shape_and_extreme(engine, T, N, D, B, log_lam, p_max, a_min, padding, seed) -> None:
    # "One overwhelming token" in docs/engines.md: with hardly any others, d lam_v has no digits.
    assume(log_lam < 1 or B * T * D >= 64)
    case = Case(B=B, T=T, N=N, D=D, lam_max=10.0**log_lam, p_max=p_max, a_min=a_min, seed=seed)
    case = (
        replace(case, B=1, documents=4) if padding == "packed" else replace(case, padding=padding)
    )
    check(engine, case)


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_same_bits_on_every_run_and_for_every_number_of_threads(engine: str) -> None:
    call = make_call(Case(B=3, T=affordable(20, 300), N=4, D=70))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 7, 2):
            torch.set_num_threads(count)
            results.append(run_call(call, engine, torch.float32))
    finally:
        torch.set_num_threads(threads)
    for one, other in itertools.pairwise(results):
        assert all(torch.equal(one[name], other[name]) for name in one)
