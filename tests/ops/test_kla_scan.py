"""What users rely on: splitting, padding, packing, stepping, all with gradients."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kalman_attention import (
    KLAState,
    ScanOutput,
    kla_scan,
    kla_scan_ref,
    kla_step,
    kla_step_ref,
)
from kalman_attention.ops import kla_scan as kla_scan_module
from kalman_attention.ops.engines import Engine
from kalman_attention.tools.selfcheck import Case, make_call
from tests.engines import EVERY_ENGINE, affordable

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def draw(case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.to(dtype) for x in make_call(case).tensors]


def pad(tokens: list[Tensor], length: int, side: str, fill: float = 7.0) -> list[Tensor]:
    extra = length - tokens[0].shape[1]
    widths = (0, 0, extra, 0) if side == "left" else (0, 0, 0, extra)
    return [torch.nn.functional.pad(x, widths, value=fill) for x in tokens]


@pytest.mark.parametrize("engine", ["reference", *EVERY_ENGINE])
@settings(deadline=None, max_examples=affordable(2, 10))
@given(cuts=st.lists(st.integers(0, 140), max_size=4), seed=st.integers(0, 999))
def test_splitting_anywhere_equals_one_pass(engine: str, cuts: list[int], seed: int) -> None:
    *args, mean, variance = draw(Case(B=2, T=140, N=3, D=5, seed=seed))
    state = KLAState(mean, variance)
    whole = kla_scan(*args, state=state, return_variance=True, engine=engine)
    parts = []
    bounds = [0, *sorted(cuts), 140]
    for start, end in itertools.pairwise(bounds):
        tokens = [x[:, start:end] for x in args[:4]]
        parts.append(kla_scan(*tokens, *args[4:], state=state, return_variance=True, engine=engine))
        state = parts[-1].state
    y, y_var = (torch.cat([getattr(p, name) for p in parts], 1) for name in ("y", "y_var"))
    pairs = [(y, whole.y), (y_var, whole.y_var), *zip(state, whole.state, strict=True)]
    for found, expected in pairs:
        # As the contract measures: an engine that splits time rounds differently in the parts.
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("engine", ["reference", *EVERY_ENGINE])
def test_gradients_flow_through_a_carried_state(engine: str) -> None:
    args = [x.requires_grad_() for x in draw(Case(B=2, T=90, N=3, D=5), torch.float64)]
    state = KLAState(*args[6:])

    def run(*pieces: slice) -> tuple[Tensor, ...]:
        belief, total = state, torch.zeros((), dtype=torch.float64)
        for piece in pieces:
            tokens = [x[:, piece] for x in args[:4]]
            out = kla_scan(*tokens, *args[4:6], state=belief, engine=engine)
            belief, total = out.state, total + out.y.square().sum()
        return torch.autograd.grad(total + belief.variance.sum(), args)

    whole, split = run(slice(0, 90)), run(slice(0, 37), slice(37, 37), slice(37, 90))
    torch.testing.assert_close(split, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", ["reference", *EVERY_ENGINE])
@pytest.mark.parametrize("fill", [7.0, float("nan")], ids=["junk", "nan"])
def test_left_padding_is_right_padding_is_none(engine: str, fill: float) -> None:
    *args, mean, variance = draw(Case(B=2, T=50, N=3, D=5))
    state = KLAState(mean, variance)
    leaves = [x.clone().requires_grad_() for x in args]
    alone = kla_scan(*leaves, state=state, return_variance=True, engine=engine)
    wanted = torch.autograd.grad(alone.y.square().sum() + alone.state.mean.sum(), leaves)
    for side, real in (("left", slice(30, 80)), ("right", slice(0, 50))):
        mask = torch.zeros(2, 80, dtype=torch.bool)
        mask[:, real] = True
        leaves = [x.requires_grad_() for x in pad(args[:4], 80, side, fill)]
        leaves += [x.clone().requires_grad_() for x in args[4:]]
        out = kla_scan(*leaves, state=state, mask=mask, return_variance=True, engine=engine)
        torch.testing.assert_close(out.y[:, real], alone.y, **CLOSE)
        torch.testing.assert_close(out.y_var[:, real], alone.y_var, **CLOSE)
        torch.testing.assert_close(out.state, alone.state, **CLOSE)
        assert (out.y[~mask] == 0).all()
        assert (out.y_var[~mask] == 0).all()
        got = torch.autograd.grad(out.y.square().sum() + out.state.mean.sum(), leaves)
        for g, w in zip(got[:4], wanted[:4], strict=True):
            torch.testing.assert_close(g[:, real], w, rtol=1e-4, atol=1e-5)
            assert (g[~mask] == 0).all()
        torch.testing.assert_close(got[4:], wanted[4:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["reference", *EVERY_ENGINE])
def test_a_row_of_padding_leaves_the_belief_exactly_alone(engine: str) -> None:
    *args, mean, variance = draw(Case(B=2, T=70, N=3, D=5))
    mask = torch.zeros(2, 70, dtype=torch.bool)
    out = kla_scan(*args, state=KLAState(mean, variance), mask=mask, engine=engine)
    assert torch.equal(out.state.mean, mean)
    assert torch.equal(out.state.variance, variance)
    assert (out.y == 0).all()


@pytest.mark.parametrize("engine", ["reference", *EVERY_ENGINE])
def test_packed_equals_separate_with_gradients(engine: str) -> None:
    bounds = [0, 3, 3, 70, 134, 150]
    args = [x.requires_grad_() for x in draw(Case(B=1, T=150, N=3, D=5, documents=5))]
    state = KLAState(*args[6:])
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    packed = kla_scan(*args[:6], state=state, cu_seqlens=cu_seqlens, engine=engine)
    singles = [
        kla_scan(
            *(x[:, start:end] for x in args[:4]),
            *args[4:6],
            state=KLAState(*(x[i : i + 1] for x in state)),
            engine=engine,
        )
        for i, (start, end) in enumerate(itertools.pairwise(bounds))
    ]
    y = torch.cat([out.y for out in singles], 1)
    last = KLAState(*(torch.cat(x) for x in zip(*(out.state for out in singles), strict=True)))
    torch.testing.assert_close(packed.y, y, **CLOSE)
    torch.testing.assert_close(packed.state, last, **CLOSE)
    got = torch.autograd.grad(packed.y.square().sum() + packed.state.variance.sum(), args)
    wanted = torch.autograd.grad(y.square().sum() + last.variance.sum(), args)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["reference", *EVERY_ENGINE])
def test_packed_documents_start_from_the_unit_prior(engine: str) -> None:
    args = draw(Case(B=1, T=20, N=3, D=5))[:6]
    packed = kla_scan(*args, cu_seqlens=torch.tensor([0, 12, 20]), engine=engine)
    second = kla_scan(*(x[:, 12:] for x in args[:4]), *args[4:], engine=engine)
    torch.testing.assert_close(packed.y[:, 12:], second.y, **CLOSE)


@pytest.mark.parametrize("engine", EVERY_ENGINE)
def test_a_step_runs_the_engine_that_was_asked_for(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    for name in ("load", "load_step"):
        load = getattr(Engine, name)
        monkeypatch.setattr(Engine, name, lambda e, load=load: (asked.append(e.name), load(e))[1])
    monkeypatch.setattr(kla_scan_module, "reference_step", lambda *_, **__: pytest.fail("swapped"))
    args = draw(Case(B=2, T=1, N=3, D=5))
    tokens = [x[:, 0] for x in args[:4]]
    kla_step(*tokens, *args[4:6], KLAState(*args[6:]), engine=engine)
    assert asked == [engine]


@pytest.mark.parametrize("engine", ["auto", "reference", *EVERY_ENGINE])
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_steps_equal_the_scan(engine: str, grad: bool) -> None:
    args = [x.requires_grad_(grad) for x in draw(Case(B=3, T=9, N=3, D=5))]
    state = KLAState(*args[6:])
    whole = kla_scan_ref(*args[:6], state=state, return_variance=True)
    outs = []
    for t in range(9):
        tokens = [x[:, t] for x in args[:4]]
        out = kla_step(*tokens, *args[4:6], state, return_variance=True, engine=engine)
        assert isinstance(out, ScanOutput)
        assert out.y.shape == (3, 5)
        outs.append(out)
        state = out.state
    torch.testing.assert_close(torch.stack([o.y for o in outs], 1), whole.y, **CLOSE)
    torch.testing.assert_close(torch.stack([o.y_var for o in outs], 1), whole.y_var, **CLOSE)
    torch.testing.assert_close(state, whole.state, **CLOSE)
    if grad:
        got = torch.autograd.grad(sum(o.y.square().sum() for o in outs), args)
        wanted = torch.autograd.grad(whole.y.square().sum(), args)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ["auto", "reference", *EVERY_ENGINE])
def test_a_masked_step_changes_nothing_and_no_step_works_in_place(engine: str) -> None:
    args = draw(Case(B=2, T=1, N=3, D=5))
    state = KLAState(*(x.clone() for x in args[6:]))
    tokens = [x[:, 0] for x in args[:4]]
    mask = torch.tensor([True, False])
    out = kla_step(*tokens, *args[4:6], state, mask=mask, return_variance=True, engine=engine)
    assert torch.equal(state.mean, args[6])
    assert torch.equal(state.variance, args[7])
    assert torch.equal(out.state.mean[1], state.mean[1])
    assert torch.equal(out.state.variance[1], state.variance[1])
    assert (out.y[1] == 0).all()
    assert (out.y_var[1] == 0).all()
    assert (out.state.variance[0] != state.variance[0]).any()


@pytest.mark.parametrize("engine", ["reference", *EVERY_ENGINE])
def test_every_position_has_its_meaning(engine: str) -> None:
    # By hand. Queries and keys have one shape, so nothing but a number tells when they are swapped.
    given = {"q": 2.0, "k": 3.0, "v": 5.0, "lam_v": 7.0, "a_bar": 0.5, "p_bar": 0.25}
    P = 0.5**2 * 1.0 + 0.25
    s = 1 / (1 / P + 3.0**2 * 7.0)
    y, y_var = 2.0 * s * 3.0 * 7.0 * 5.0, 2.0**2 * s
    token = {name: torch.full((1, 1), x) for name, x in given.items()}
    row = {n: x.view(1, 1, 1) if n in ("q", "k", "v", "lam_v") else x for n, x in token.items()}
    prior = KLAState.unit_prior(1, 1, 1)
    options = {"return_variance": True, "engine": engine}
    for out in (
        kla_scan(*row.values(), **options),
        kla_scan(**row, **options),
        kla_scan_ref(*row.values(), return_variance=True),
        kla_step(*token.values(), prior, **options),
        kla_step(**token, state=prior, **options),
        kla_step_ref(*token.values(), prior, return_variance=True),
    ):
        torch.testing.assert_close(out.y.item(), y, rtol=1e-6, atol=0)
        torch.testing.assert_close(out.y_var.item(), y_var, rtol=1e-6, atol=0)


def test_uninitialised_memory_is_loud() -> None:
    # The fixture of conftest.py: an output that an engine forgets to write is NaN, not luck.
    assert torch.empty(3).isnan().all()


def test_variance_only_when_asked_for() -> None:
    args = draw(Case(B=1, T=4, N=2, D=3))[:6]
    assert kla_scan(*args).y_var is None
    assert kla_scan(*args, return_variance=True).y_var is not None


def test_state_shows_the_papers_coordinates() -> None:
    state = KLAState(mean=torch.tensor([3.0]), variance=torch.tensor([0.25]))
    assert state.lam.item() == 4.0
    assert state.eta.item() == 12.0


def test_no_evidence_is_a_pure_predict_step() -> None:
    q, k, v, lam_v, a_bar, p_bar, mean, variance = draw(Case(B=2, T=1, N=3, D=5))
    out = kla_scan(q, k, v, 0 * lam_v, a_bar, p_bar, state=KLAState(mean, variance))
    torch.testing.assert_close(out.state.mean, a_bar * mean)
    torch.testing.assert_close(out.state.variance, a_bar**2 * variance + p_bar)
