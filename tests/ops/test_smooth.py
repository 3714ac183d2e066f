"""Smoothing and innovations as ops, against dense conditioning and finite differences."""

import pytest
import torch

from kalman_attention import (
    KLAState,
    discretise,
    kla_innovations,
    kla_scan_ref,
    kla_smooth,
    use_engine,
)
from kalman_attention.ops import cpu
from kalman_attention.tools.selfcheck import Call, Case, make_call
from tests.filtering.test_smoothing import dense_path
from tests.oracles import oracle_readout
from tests.systems import System, assert_close, random_state, random_system


def leaves(x: System, state: KLAState) -> list[torch.Tensor]:
    return [z.clone().requires_grad_() for z in (*x, *state)]


def test_smoothing_is_conditioning_on_all_tokens() -> None:
    x, state = random_system(T=8, seed=2), random_state()
    y, y_var = oracle_readout(x.q, dense_path(x, state))
    out = kla_smooth(*x, state=state)
    assert_close(out.y, y, rtol=1e-10, atol=1e-12)
    assert_close(out.y_var, y_var, rtol=1e-10, atol=1e-12)
    assert_close(out.state, kla_scan_ref(*x, state=state).state)


def test_a_gap_is_interpolated_and_missing_values_are_not_read() -> None:
    T, one = 41, torch.ones(1, 41, 1, dtype=torch.float64)
    v = torch.linspace(-1, 1, T, dtype=torch.float64).view(1, T, 1)
    seen = (torch.arange(T) < 15) | (torch.arange(T) > 25)
    lam_v = 400.0 * seen.view(1, T, 1).double()
    a_bar, p_bar = one[0, :1], 0.01 * one[0, :1]
    given = (one, one, v.where(lam_v > 0, torch.nan), lam_v, a_bar, p_bar)
    after, before = kla_smooth(*given), kla_scan_ref(*given, return_variance=True)
    assert (after.y - v).abs().max() < 0.05
    assert (before.y - v).abs().max() > 0.3  # the filter cannot know that the series goes on
    assert after.y_var is not None
    assert before.y_var is not None
    assert bool((after.y_var <= before.y_var).all())


@pytest.mark.parametrize("case", ["mask", "packed", "dt", "blocks"])
def test_every_kind_of_call_is_that_of_plain_rows(case: str) -> None:
    x, state = random_system(B=1, T=7, N=4, negative=False), random_state(rows=1, N=4)
    if case == "mask":  # padding on both sides is the row without it
        mask = torch.tensor([[False, True, True, False, True, True, False]])
        holes = x._replace(v=x.v.masked_fill(~mask.unsqueeze(-1), torch.nan))
        kept = System(*(z[:, mask[0]] for z in x[:4]), *x[4:])
        out, plain = kla_smooth(*holes, state=state, mask=mask), kla_smooth(*kept, state=state)
        assert_close(out.y[:, mask[0]], plain.y)
        assert_close(out.y_var[:, mask[0]], plain.y_var)
        assert out.y[:, ~mask[0]].abs().max() == out.y_var[:, ~mask[0]].abs().max() == 0.0
        assert_close(out.state, plain.state)
    elif case == "packed":
        states = random_state(rows=3, N=4)
        out = kla_smooth(*x, state=states, cu_seqlens=torch.tensor([0, 3, 3, 7]))
        for i, (start, end) in enumerate([(0, 3), (3, 3), (3, 7)]):
            row = System(*(z[:, start:end] for z in x[:4]), *x[4:])
            alone = kla_smooth(*row, state=KLAState(*(z[i : i + 1] for z in states)))
            assert_close(out.y[:, start:end], alone.y)
            assert_close(KLAState(*(z[i : i + 1] for z in out.state)), alone.state)
    elif case == "dt":  # a gap of 2 is an unseen token in between
        wide = System(*(torch.repeat_interleave(z, 2, 1) for z in x[:4]), *x[4:])
        lam_v = wide.lam_v * (torch.arange(14) % 2).view(1, 14, 1)
        dense = kla_smooth(*wide._replace(lam_v=lam_v), state=state)
        out = kla_smooth(*x, state=state, dt=torch.full((1, 7), 2.0, dtype=torch.float64))
        assert_close(out.y, dense.y[:, 1::2], rtol=1e-11)
        assert_close(out.y_var, dense.y_var[:, 1::2], rtol=1e-11)
    else:  # one token seen as a whole by blocks: the last read-out is the filter's
        shared = x._replace(a_bar=x.a_bar[:2], p_bar=x.p_bar[:2])
        first = KLAState(state.mean, state.variance[:, :2])
        out = kla_smooth(*shared, state=first)
        plain = kla_scan_ref(*shared, state=first, return_variance=True)
        assert_close(out.y[:, -1], plain.y[:, -1])
        assert out.y_var is not None
        assert plain.y_var is not None
        # The last ones are equal, but for the rounding of two engines.
        assert bool((out.y_var <= plain.y_var * (1.0 + 1e-14)).all())


def test_no_tokens() -> None:
    x, state = random_system(T=0), random_state()
    out = kla_smooth(*x, state=state)
    assert out.y.shape == (2, 0, 2)
    assert_close(out.state, state)
    assert kla_innovations(*x[1:], state=state).normalised.shape == (2, 0, 3, 2)


def test_gradients() -> None:
    x, state = random_system(B=1, T=4, N=2), random_state(rows=1, N=2)

    def outputs(*z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = kla_smooth(*z[:6], state=KLAState(*z[6:]))
        found = kla_innovations(*z[1:6], state=KLAState(*z[6:]))
        assert out.y_var is not None
        return out.y, out.y_var, *found

    assert torch.autograd.gradcheck(outputs, leaves(x, state))


def test_float32_keeps_the_contract() -> None:
    x, state = random_system(B=1, T=500, negative=False), random_state(rows=1)
    exact = kla_smooth(*x, state=state)
    out = kla_smooth(*(z.float() for z in x), state=KLAState(*(z.float() for z in state)))
    for got, wanted in zip(out[:2], exact[:2], strict=True):
        assert got is not None
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_the_likelihood_of_a_series_fits_its_model() -> None:
    """Decay and noise of an Ornstein-Uhlenbeck process, from what is seen of it."""
    g = torch.Generator().manual_seed(0)
    T, noise = 3000, 0.2
    a_bar, p_bar = discretise(*(torch.tensor([[x]], dtype=torch.float64) for x in (0.1, 0.5, 1.0)))
    z, series = torch.zeros((), dtype=torch.float64), []
    for e in torch.randn(T, generator=g, dtype=torch.float64):
        z = a_bar.item() * z + p_bar.item() ** 0.5 * e
        series.append(z)
    v = torch.stack(series) + noise**0.5 * torch.randn(T, generator=g, dtype=torch.float64)
    one = torch.ones(1, T, 1, dtype=torch.float64)

    def likelihood(decay: float, drift: float) -> float:
        found = kla_innovations(
            one, v.view(1, T, 1), one / noise, decay * one[0, :1], drift * one[0, :1]
        )
        return found.log_likelihood.sum().item()

    best = likelihood(a_bar.item(), p_bar.item())
    assert best > likelihood(0.75, p_bar.item())
    assert best > likelihood(a_bar.item(), 2.0 * p_bar.item())
    found = kla_innovations(one, v.view(1, T, 1), one / noise, a_bar, p_bar)
    assert found.normalised.mean().item() == pytest.approx(1.0, abs=0.1)


def test_shared_precision_has_no_innovations_per_slot() -> None:
    x = random_system(N=4)
    with pytest.raises(ValueError, match="per slot"):
        kla_innovations(*x[1:4], x.a_bar[:2], x.p_bar[:2])


CASES = {
    "no tokens": Case(B=2, T=0, N=3, D=4),
    "one slot": Case(B=2, T=70, N=1, D=40),
    "over chunks": Case(B=2, T=200, N=5, D=17),
    "strong evidence, no noise": Case(B=1, T=100, N=4, D=8, lam_max=1e6, p_max=0.0, a_min=1e-3),
    "padding": Case(B=3, T=90, N=4, D=8, padding="random"),
    "packed": Case(B=1, T=150, N=4, D=8, documents=5),
    "gaps": Case(B=2, T=100, N=4, D=33, gaps="channel"),
    "shared": Case(B=2, T=100, N=18, D=33, share=6),
    "both": Case(B=2, T=100, N=8, D=8, share=2, gaps="token", padding="left"),
}


def smoothed(call: Call, tensors: list[torch.Tensor], engine: str) -> list[torch.Tensor]:
    dt = tensors[8] if len(tensors) > 8 else None
    state = KLAState(*tensors[6:8])
    out = kla_smooth(*tensors[:6], state=state, dt=dt, engine=engine, **call.options)
    assert out.y_var is not None
    return [out.y, out.y_var, *out.state]


NATIVE = pytest.param(
    "cpu", marks=pytest.mark.skipif(cpu.why_not() is not None, reason=str(cpu.why_not()))
)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("engine", ["associative", NATIVE])
def test_engines_are_the_loop(case: Case, dtype: torch.dtype, engine: str) -> None:
    call = make_call(case)
    wanted = smoothed(call, list(call.tensors), "reference")
    got = smoothed(call, [x.to(dtype) for x in call.tensors], engine)
    for i, (x, y) in enumerate(zip(got, wanted, strict=True)):
        if y.numel() == 0:
            continue
        allowed = 1e-9 if dtype == torch.float64 else 1e-5 if i < 2 else 1e-4
        assert (x.double() - y).abs().max() <= allowed * y.abs().max()


def gradients(call: Call, engine: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """With respect to every floating input, of random weights of every output."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in call.tensors]
    found = smoothed(call, leaves, engine)
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype) for x in found]
    return torch.autograd.grad(found, leaves, weights, materialize_grads=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("engine", ["associative", NATIVE])
def test_gradients_are_those_of_the_loop(case: Case, engine: str) -> None:
    call = make_call(case)
    wanted = gradients(call, "reference", torch.float64)
    for x, y in zip(gradients(call, engine, torch.float64), wanted, strict=True):
        assert x.shape == y.shape
        if y.numel():
            assert (x - y).abs().max() <= 1e-9 * y.abs().max()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("engine", [NATIVE])
def test_gradients_in_float32_are_as_good_as_those_of_the_loop(case: Case, engine: str) -> None:
    call = make_call(case)
    wanted = gradients(call, "reference", torch.float64)
    loop = gradients(call, "reference", torch.float32)
    for x, y, z in zip(gradients(call, engine, torch.float32), loop, wanted, strict=True):
        if z.numel():
            error, allowed = ((g.double() - z).abs().max() for g in (x, y))
            assert error <= 2.0 * allowed + 1e-5 * z.abs().max()


def test_the_choice_of_an_engine() -> None:
    x = random_system(B=1, T=3)
    with pytest.raises(ValueError, match="'matrix' can filter but not smooth"):
        kla_smooth(*x, engine="matrix")
    with use_engine("reference"):
        assert_close(kla_smooth(*x), kla_smooth(*x, engine="associative"))
