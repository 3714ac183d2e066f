"""``ops/reference.py``: the definition of the op, against the dense oracle."""

import itertools

import pytest
import torch
from torch import Tensor

from kalman_attention import KLAState, ScanOutput, kla_scan, kla_scan_ref, kla_step
from kalman_attention.filtering import information
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.information import to_information, to_moment
from kalman_attention.filtering.readout import read_mean, read_variance
from kalman_attention.ops.contract import ScanInputs
from kalman_attention.ops.reference import reference_scan
from tests.oracles import oracle_beliefs, oracle_readout
from tests.systems import System, assert_close, random_state, random_system


def oracle_scan(x: System, state: KLAState, mask: Tensor | None = None) -> ScanOutput:
    """``kla_scan`` by dense conditioning."""
    beliefs = oracle_beliefs(x.k, x.v, x.lam_v, x.a_bar, x.p_bar, state, mask)
    y, y_var = oracle_readout(x.q, beliefs)
    if mask is not None:
        y, y_var = (part * mask.unsqueeze(-1) for part in (y, y_var))
    return ScanOutput(y, y_var, KLAState(*(part[:, -1] for part in beliefs)))


def zero_noise(x: System) -> System:
    return x._replace(p_bar=torch.zeros_like(x.p_bar))


def no_evidence(x: System) -> System:
    return x._replace(lam_v=torch.zeros_like(x.lam_v))


def some_evidence(x: System) -> System:
    return x._replace(lam_v=torch.where(x.v > 0, x.lam_v, 0.0))


def negative_decay(x: System) -> System:
    return x._replace(a_bar=-x.a_bar.abs())


def no_decay(x: System) -> System:
    return x._replace(a_bar=torch.ones_like(x.a_bar))


def strong_evidence(x: System) -> System:
    return x._replace(lam_v=1e3 * x.lam_v)


CASES = [zero_noise, no_evidence, some_evidence, negative_decay, no_decay, strong_evidence]


@pytest.mark.parametrize("change", CASES, ids=lambda f: f.__name__)
def test_reference_against_the_oracle(change):
    x, state = change(random_system(B=2, T=10)), random_state()
    out = kla_scan_ref(*x, state=state, return_variance=True)
    assert_close(out, oracle_scan(x, state), rtol=1e-10, atol=1e-12)


def test_default_prior_is_the_unit_gaussian():
    x = random_system()
    out = kla_scan_ref(*x, return_variance=True)
    assert_close(out, oracle_scan(x, KLAState(torch.zeros(2, 3, 2), torch.ones(2, 3, 2))), 1e-11)


@pytest.mark.parametrize(
    "mask",
    [[[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]], [[1, 0, 1, 0, 1], [0, 0, 0, 0, 0]]],
    ids=["left and right", "holes and all"],
)
def test_mask_against_the_oracle(mask):
    x, state, mask = random_system(B=2, T=5), random_state(), torch.tensor(mask).bool()
    out = kla_scan_ref(*x, state=state, mask=mask, return_variance=True)
    assert_close(out, oracle_scan(x, state, mask), rtol=1e-11)


def test_padding_may_hold_anything():
    x, mask = random_system(B=1, T=4), torch.tensor([[True, False, True, False]])
    clean = kla_scan_ref(*x, mask=mask, return_variance=True)
    holes = (part.masked_fill(~mask.unsqueeze(-1), torch.nan) for part in x[:4])
    inputs = [part.requires_grad_() for part in holes]
    dirty = kla_scan_ref(*inputs, x.a_bar, x.p_bar, mask=mask, return_variance=True)
    assert_close(dirty, clean, rtol=0, atol=0)
    for grad in torch.autograd.grad(dirty.y.sum() + dirty.y_var.sum(), inputs):
        assert not grad[~mask].any()
        assert grad[mask].isfinite().all()


@pytest.mark.parametrize("return_variance", [True, False])
def test_packed_documents_against_the_oracle(return_variance):
    x, state = random_system(B=1, T=9), random_state(rows=3)
    bounds = [0, 4, 4, 9]
    out = kla_scan_ref(
        *x, state=state, cu_seqlens=torch.tensor(bounds), return_variance=return_variance
    )
    assert (out.y_var is not None) == return_variance
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        before = KLAState(*(part[i : i + 1] for part in state))
        last = KLAState(*(part[i : i + 1] for part in out.state))
        if start == end:
            assert_close(last, before, rtol=0, atol=0)
            continue
        document = System(*(part[:, start:end] for part in x[:4]), x.a_bar, x.p_bar)
        expected = oracle_scan(document, before)
        assert_close(last, expected.state, rtol=1e-11)
        assert_close(out.y[:, start:end], expected.y, rtol=1e-11)
        if out.y_var is not None:
            assert_close(out.y_var[:, start:end], expected.y_var, rtol=1e-11)


def test_no_tokens_leave_the_belief():
    x, state = random_system(T=0), random_state()
    out = kla_scan_ref(*x, state=state, return_variance=True)
    assert out.y.shape == out.y_var.shape == (2, 0, 2)
    assert_close(out.state, state, rtol=0, atol=0)


def test_reference_is_a_loop_over_the_information_step():
    x, state = random_system(B=2, T=30), random_state()
    out = kla_scan_ref(*x, state=state, return_variance=True)
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    belief = to_information(state)
    for t in range(30):
        belief = information.step(belief, x.a_bar, x.p_bar, phi[:, t], b[:, t])
        now = to_moment(belief)
        assert_close(out.y[:, t], read_mean(x.q[:, t], now.mean))
        assert_close(out.y_var[:, t], read_variance(x.q[:, t], now.variance))
    assert_close(out.state, to_moment(belief))


def test_why_the_loop_is_not_in_information_form():
    # No process noise and one slot with a_bar = 1/2: the precision passes 4^t and overflows.
    T, one = 600, torch.ones(1, 1, dtype=torch.float64)
    x = random_system(B=1, T=T, N=1, D=1)._replace(a_bar=0.5 * one, p_bar=0 * one)
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    belief = to_information(KLAState.unit_prior(1, 1, 1, dtype=torch.float64))
    for t in range(T):
        belief = information.step(belief, x.a_bar, x.p_bar, phi[:, t], b[:, t])
    assert to_moment(belief).mean.isnan()
    # The true belief: z_t = 2^-t z_0, so the mean follows z_0 | v, which early tokens settle.
    out = kla_scan_ref(*x, return_variance=True)
    scale = 0.5 ** torch.arange(1, T + 1, dtype=torch.float64).view(1, T, 1)
    seen = (scale * x.k) ** 2 * x.lam_v
    variance = 1 / (1 + seen.cumsum(1))
    mean = variance * (scale * x.k * x.lam_v * x.v).cumsum(1)
    assert_close(out.y[:, :500], (x.q * scale * mean)[:, :500], atol=0)
    assert_close(out.y_var[:, :500], (x.q**2 * scale**2 * variance)[:, :500], atol=0)
    assert (out.state.variance == 0).all()
    assert out.state.mean.isfinite().all()


def test_carrying_the_state_is_one_pass():
    x, state = random_system(T=9), random_state()
    whole = kla_scan_ref(*x, state=state, return_variance=True)
    for cut in range(10):
        first = System(*(part[:, :cut] for part in x[:4]), x.a_bar, x.p_bar)
        second = System(*(part[:, cut:] for part in x[:4]), x.a_bar, x.p_bar)
        head = kla_scan_ref(*first, state=state, return_variance=True)
        tail = kla_scan_ref(*second, state=head.state, return_variance=True)
        assert_close(torch.cat([head.y, tail.y], 1), whole.y, rtol=0, atol=0)
        assert_close(torch.cat([head.y_var, tail.y_var], 1), whole.y_var, rtol=0, atol=0)
        assert_close(tail.state, whole.state, rtol=0, atol=0)


def test_step_is_a_scan_of_one_token():
    x, state = random_system(T=1), random_state()
    scan = kla_scan_ref(*x, state=state, return_variance=True)
    token = [part[:, 0] for part in x[:4]]
    step = kla_step(*token, x.a_bar, x.p_bar, state, return_variance=True, engine="reference")
    assert_close(step, ScanOutput(scan.y[:, 0], scan.y_var[:, 0], scan.state), rtol=0, atol=0)


def test_algorithm_1_of_the_paper_is_the_reference():
    x, state = random_system(T=70), random_state()
    scans = kla_scan(*x, state=state, return_variance=True, engine="mobius")
    assert_close(scans, kla_scan_ref(*x, state=state, return_variance=True), rtol=1e-11)


def test_half_precision_tokens_are_filtered_in_float32():
    x = random_system()
    short = [part.bfloat16() for part in x[:4]]
    long = [part.float() for part in short]
    dynamics = [part.float() for part in x[4:]]
    out = kla_scan_ref(*short, *dynamics, return_variance=True)
    expected = kla_scan_ref(*long, *dynamics, return_variance=True)
    assert out.y.dtype == out.y_var.dtype == torch.bfloat16
    assert out.state.mean.dtype == torch.float32
    assert_close(out.state, expected.state, rtol=0, atol=0)
    assert_close(out.y, expected.y.bfloat16(), rtol=0, atol=0)


MASK = torch.tensor([[False, True, True, True], [True, False, True, False]])
BOUNDS = torch.tensor([0, 3, 3, 4])


@pytest.mark.parametrize(
    ("mask", "cu_seqlens"),
    [(None, None), (MASK, None), (None, BOUNDS)],
    ids=["plain", "mask", "packed"],
)
@pytest.mark.parametrize("change", [negative_decay, zero_noise, no_evidence])
def test_gradcheck(change, mask, cu_seqlens):
    B, rows = (2, 2) if cu_seqlens is None else (1, 3)
    x, state = change(random_system(B=B, T=4, N=2, D=2)), random_state(rows, N=2, D=2)
    inputs = [part.clone().requires_grad_() for part in (*x, *state)]

    def outputs(*args):
        # Past the checks: finite differences at p_bar = 0 step to negative noise.
        out = reference_scan(ScanInputs(*args, mask, cu_seqlens), return_variance=True)
        return out.y, out.y_var, *out.state

    assert torch.autograd.gradcheck(outputs, inputs, eps=1e-6, atol=1e-7, rtol=1e-6)
