"""Time between tokens, ``dt``: what it means, and every engine that takes it."""

import pytest
import torch

from kalman_attention import KLAState, kla_scan, kla_scan_ref, kla_step
from kalman_attention.ops.contract import ScanInputs
from kalman_attention.ops.engines import ENGINES
from kalman_attention.ops.reference import reference_scan
from kalman_attention.tools.selfcheck import Case, make_call
from tests.engines import EVERY_ENGINE
from tests.ops.test_engines import check
from tests.oracles import oracle_beliefs, oracle_readout
from tests.systems import assert_close, random_state, random_system

TAKES_GAPS = [p for p in EVERY_ENGINE if ENGINES[p.values[0]].gaps]
TAKES_NONE = [p for p in EVERY_ENGINE if not ENGINES[p.values[0]].gaps]

CASES = {
    "one of everything": Case(B=1, T=1, N=1, D=1, gaps="channel"),
    "no tokens": Case(B=2, T=0, N=3, D=4, gaps="token"),
    "per token": Case(B=2, T=77, N=3, D=5, gaps="token"),
    "per channel": Case(B=2, T=130, N=3, D=5, gaps="channel"),
    "no process noise": Case(B=2, T=200, N=3, D=8, p_max=0.0, a_min=1e-3, gaps="channel"),
    "no decay": Case(B=1, T=100, N=2, D=3, a_min=1.0, gaps="token"),
    "strong evidence": Case(B=2, T=130, N=4, D=8, lam_max=1e6, gaps="token"),
    "left padding": Case(B=3, T=90, N=4, D=8, padding="left", gaps="token"),
    "holes": Case(B=3, T=130, N=4, D=8, padding="random", gaps="channel"),
    "packed": Case(B=1, T=200, N=4, D=8, documents=6, gaps="token"),
}


@pytest.mark.parametrize("engine", TAKES_GAPS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_values_and_gradients(engine: str, case: Case, dtype: torch.dtype) -> None:
    check(engine, case, dtype)


def drawn(case: Case) -> tuple[list[torch.Tensor], KLAState, torch.Tensor]:
    tensors = list(make_call(case).tensors)
    return tensors[:6], KLAState(*tensors[6:8]), tensors[8]


def test_reference_against_the_oracle() -> None:
    x = random_system(B=2, T=6, N=2, D=3, negative=False)
    x.a_bar[0, 0] = 1.0
    state, mask = random_state(2, 2, 3), torch.rand(2, 6) < 0.8
    for width in (1, 3):
        dt = 3.0 * torch.rand(2, 6, width, dtype=torch.float64)
        out = kla_scan_ref(
            *x, state=state, mask=mask, dt=dt.expand(2, 6, 3) if width == 3 else dt[..., 0],
            return_variance=True,
        )  # fmt: skip
        full = dt.expand(2, 6, 3)
        beliefs = oracle_beliefs(x.k, x.v, x.lam_v, x.a_bar, x.p_bar, state, mask, full)
        y, y_var = oracle_readout(x.q, beliefs)
        real = mask.unsqueeze(-1)
        assert_close(out.y, torch.where(real, y, 0.0), rtol=1e-9, atol=1e-10)
        assert_close(out.y_var, torch.where(real, y_var, 0.0), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("engine", ["reference", *TAKES_GAPS])
def test_one_unit_everywhere_is_no_dt(engine: str) -> None:
    args, state, dt = drawn(Case(B=2, T=70, N=3, D=5, gaps="token"))
    options = {"state": state, "return_variance": True, "engine": engine}
    assert_close(
        kla_scan(*args, dt=torch.ones_like(dt), **options),
        kla_scan(*args, **options),
        rtol=1e-11,
        atol=1e-12,
    )


@pytest.mark.parametrize("engine", ["reference", *TAKES_GAPS])
def test_a_gap_may_be_cut_by_a_token_without_evidence(engine: str) -> None:
    args, state, dt = drawn(Case(B=2, T=20, N=3, D=5, gaps="channel"))
    whole = kla_scan(*args, dt=dt, state=state, engine=engine)
    share = torch.rand(dt.shape, generator=torch.Generator().manual_seed(0), dtype=dt.dtype)
    # Every gap in two: first a silent token after a share of it, then the token itself.
    halves = torch.stack([share * dt, (1 - share) * dt], 2).flatten(1, 2)
    q, k, v, lam_v = (x.repeat_interleave(2, dim=1) for x in args[:4])
    lam_v[:, ::2] = 0.0
    cut = kla_scan(q, k, v, lam_v, *args[4:], dt=halves, state=state, engine=engine)
    assert_close(cut.y[:, 1::2], whole.y, rtol=1e-10, atol=1e-12)
    assert_close(cut.state, whole.state, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ["reference", *TAKES_GAPS])
def test_no_time_and_no_evidence_is_the_identity(engine: str) -> None:
    args, state, dt = drawn(Case(B=2, T=9, N=3, D=5, gaps="token"))
    args[3] = torch.zeros_like(args[3])
    out = kla_scan(*args, dt=torch.zeros_like(dt), state=state, engine=engine)
    assert torch.equal(out.state.mean, state.mean)
    assert torch.equal(out.state.variance, state.variance)


@pytest.mark.parametrize("engine", ["auto", "reference", *TAKES_GAPS])
def test_steps_equal_the_scan(engine: str) -> None:
    args, state, dt = drawn(Case(B=2, T=5, N=3, D=4, gaps="channel"))
    whole = kla_scan_ref(*args, dt=dt, state=state)
    for t in range(5):
        tokens = [x[:, t] for x in args[:4]]
        state = kla_step(*tokens, *args[4:], state, dt=dt[:, t], engine=engine).state
    assert_close(state, whole.state, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", TAKES_GAPS)
def test_decay_so_fast_that_only_noise_is_left(engine: str) -> None:
    args, state, dt = drawn(Case(B=1, T=20, N=2, D=3, gaps="channel"))
    args[3], args[4] = torch.zeros_like(args[3]), torch.full_like(args[4], 1e-3)
    grads = []
    for name, dtype in ((engine, torch.float32), ("reference", torch.float64)):
        given = [x.to(dtype).requires_grad_() for x in args]
        belief = KLAState(*(x.to(dtype) for x in state))
        out = kla_scan(
            *given, dt=(8.0 + dt).to(dtype), state=belief, return_variance=True,
            acc_dtype=dtype, engine=name,
        )  # fmt: skip
        assert out.y_var is not None
        grads.append(torch.autograd.grad(out.y_var.sum(), given[4])[0].double())
    assert (grads[0] - grads[1]).abs().max() <= 1e-4 * grads[1].abs().max()


@pytest.mark.parametrize("width", [1, 2])
def test_gradcheck(width: int) -> None:
    x, state = random_system(B=2, T=4, N=2, D=2, negative=False), random_state(2, N=2, D=2)
    dt = 0.1 + 2.0 * torch.rand(2, 4, width, dtype=torch.float64)
    inputs = [part.clone().requires_grad_() for part in (*x, *state, dt)]
    mask = torch.tensor([[False, True, True, True], [True, False, True, False]])

    def outputs(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = ScanInputs(*args[:8], mask, None, dt=args[8])
        out = reference_scan(given, return_variance=True)
        return out.y, out.y_var, *out.state

    assert torch.autograd.gradcheck(outputs, inputs, eps=1e-6, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("engine", TAKES_NONE)
def test_engines_without_gaps_name_one_that_has_them(engine: str) -> None:
    args, state, dt = drawn(Case(B=1, T=3, N=2, D=2, gaps="token"))
    with pytest.raises(ValueError, match=r"does not take dt yet.*engine='cpu' can"):
        kla_scan(*args, dt=dt, state=state, engine=engine)


def test_what_is_refused() -> None:
    args, _, dt = drawn(Case(B=1, T=3, N=2, D=2, gaps="token"))
    with pytest.raises(ValueError, match=r"dt is float64 \[1, 2\] but must be"):
        kla_scan(*args, dt=dt[:, :2])
    with pytest.raises(ValueError, match=r"a_bar must lie in \(0, 1\] with dt"):
        kla_scan(*args[:4], -args[4], args[5], dt=dt)
