"""Blocks of slots that share a precision: what they mean, and every engine that takes them."""

import pytest
import torch

from kalman_attention import KLAState, kla_scan, kla_scan_ref, kla_step
from kalman_attention.ops.engines import ENGINES
from kalman_attention.tools.selfcheck import Case, make_call
from tests.engines import EVERY_ENGINE
from tests.ops.test_engines import check
from tests.oracles import oracle_beliefs
from tests.systems import assert_close

TAKES_BLOCKS = [p for p in EVERY_ENGINE if ENGINES[p.values[0]].shared]
TAKES_NONE = [p for p in EVERY_ENGINE if not ENGINES[p.values[0]].shared]

CASES = {
    "one token": Case(B=1, T=1, N=2, D=1, share=2),
    "no tokens": Case(B=2, T=0, N=4, D=4, share=2),
    "one block": Case(B=2, T=77, N=6, D=5, share=6),
    "blocks of two": Case(B=2, T=130, N=6, D=5, share=2),
    "no process noise": Case(B=2, T=200, N=4, D=8, p_max=0.0, a_min=1e-3, share=2),
    "strong evidence": Case(B=2, T=130, N=4, D=8, lam_max=1e6, share=4),
    "left padding": Case(B=3, T=90, N=4, D=8, padding="left", share=2),
    "packed": Case(B=1, T=200, N=4, D=8, documents=6, share=2),
    "gaps": Case(B=2, T=100, N=6, D=8, share=3, gaps="channel"),
    "blocks of five": Case(B=2, T=70, N=10, D=17, share=5),
    "many slots": Case(B=1, T=131, N=64, D=65, share=64, signed=False, a_min=0.9),
    "many slots, fast": Case(B=1, T=67, N=66, D=64, share=33, a_min=1e-4, lam_max=1e6),
    "many slots, gaps": Case(B=1, T=66, N=32, D=32, share=32, gaps="token", padding="random"),
    "gaps and holes": Case(B=2, T=100, N=4, D=3, share=4, gaps="token", padding="random"),
}


@pytest.mark.parametrize("engine", TAKES_BLOCKS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_values_and_gradients(engine: str, case: Case, dtype: torch.dtype) -> None:
    if case.gaps and not ENGINES[engine].gaps:
        pytest.skip(f"{engine} does not take dt yet")
    check(engine, case, dtype)


def drawn(case: Case) -> tuple[list[torch.Tensor], KLAState]:
    tensors = list(make_call(case).tensors)
    return tensors[:6], KLAState(*tensors[6:8])


def test_reference_against_the_oracle() -> None:
    # Slot n of block g sees k_n v / |k_g|^2 with precision |k_g|^2 lam_v, through a key of 1.
    B, T, N, D, m = 2, 6, 6, 3, 3
    (q, k, v, lam_v, a_bar, p_bar), state = drawn(Case(B=B, T=T, N=N, D=D, share=m))
    out = kla_scan_ref(q, k, v, lam_v, a_bar, p_bar, state=state, return_variance=True)
    y, y_var = torch.zeros_like(v), torch.zeros_like(v)
    for n in range(N):
        g = slice(n // m, n // m + 1)
        part = k[..., n - n % m : n - n % m + m]
        square = part.square().sum(-1, keepdim=True)
        start = KLAState(state.mean[:, n : n + 1], state.variance[:, g])
        ones = torch.ones(B, T, 1, dtype=torch.float64)
        seen = k[..., n : n + 1] * v / square
        found = oracle_beliefs(ones, seen, square * lam_v, a_bar[g], p_bar[g], start)
        y += q[..., n : n + 1] * found.mean[:, :, 0]
        y_var += q[..., n : n + 1] ** 2 * found.variance[:, :, 0]
    assert_close(out.y, y, rtol=1e-9, atol=1e-10)
    assert_close(out.y_var, y_var, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("engine", ["reference", *TAKES_BLOCKS])
def test_the_belief_that_comes_out_goes_in_again(engine: str) -> None:
    args, state = drawn(Case(B=2, T=20, N=6, D=4, share=3))
    whole = kla_scan(*args, state=state, return_variance=True, engine=engine)
    assert whole.state.mean.shape == (2, 6, 4)
    assert whole.state.variance.shape == (2, 2, 4)
    half = kla_scan(*(x[:, :10] for x in args[:4]), *args[4:], state=state, engine=engine)
    belief = half.state
    for t in range(10, 20):
        tokens = [x[:, t] for x in args[:4]]
        belief = kla_step(*tokens, *args[4:], belief, engine=engine).state
    assert_close(belief, whole.state, rtol=1e-10, atol=1e-12)


def test_the_prior_of_blocks_is_the_unit_gaussian() -> None:
    args, _ = drawn(Case(B=2, T=5, N=6, D=4, share=3))
    prior = KLAState(torch.zeros(2, 6, 4).double(), torch.ones(2, 2, 4).double())
    assert_close(kla_scan_ref(*args), kla_scan_ref(*args, state=prior))


@pytest.mark.parametrize("engine", TAKES_NONE)
def test_other_engines_name_one_that_can(engine: str) -> None:
    args, state = drawn(Case(B=1, T=3, N=4, D=2, share=2))
    with pytest.raises(ValueError, match=r"share a precision yet.*engine='cpu' can"):
        kla_scan(*args, state=state, engine=engine)


def test_blocks_must_divide_the_slots() -> None:
    (q, k, v, lam_v, a_bar, p_bar), _ = drawn(Case(B=1, T=3, N=4, D=2))
    with pytest.raises(ValueError, match="3 does not divide 4"):
        kla_scan(q, k, v, lam_v, a_bar[:3], p_bar[:3])
    with pytest.raises(ValueError, match="p_bar has shape"):
        kla_scan(q, k, v, lam_v, a_bar[:2], p_bar)
