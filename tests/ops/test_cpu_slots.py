"""The native engine for every number of slots, and for decays that its adjoint cannot divide by."""

import pytest
import torch

from kalman_attention.ops import cpu
from kalman_attention.tools.selfcheck import Case, errors, make_call, misses, run_call

REASON = cpu.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

IN_TABLE = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of slots that have core loops of their own (``csrc/cpu/slots.h``)."""


@pytest.mark.parametrize("N", range(1, 71))
def test_every_number_of_slots(N: int) -> None:
    # Two chunks; one whole tile, one ragged one.
    call = make_call(Case(B=1, T=66, N=N, D=37, seed=N))
    truth = run_call(call, "reference", torch.float64)
    assert not misses(errors(run_call(call, "cpu", torch.float32), truth))


@pytest.mark.parametrize("padding", ["none", "random"])
@pytest.mark.parametrize("N", [*IN_TABLE, 3, 17, 48])
def test_float64_is_exact(N: int, padding: str) -> None:
    call = make_call(Case(B=2, T=66, N=N, D=16, padding=padding))
    truth = run_call(call, "reference", torch.float64)
    found = errors(run_call(call, "cpu", torch.float64), truth)
    assert max(found.values()) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 1e-30, -1e-7])
@pytest.mark.parametrize("every", [1, 3])
def test_decays_next_to_nothing(decay: float, every: int, dtype: torch.dtype) -> None:
    call = make_call(Case(B=2, T=130, N=4, D=21))
    call.tensors[4].view(-1)[::every] = decay
    truth = run_call(call, "reference", torch.float64)
    found = run_call(call, "cpu", dtype)
    assert not misses(errors(found, truth))
    if decay == 0.0:
        forgotten = found["d state.mean"].view(2, -1)[:, ::every]
        assert torch.equal(forgotten, torch.zeros_like(forgotten))
