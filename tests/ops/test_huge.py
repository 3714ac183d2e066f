"""More than 2^31 elements in one call: offsets must be 64 bits wide.

Needs about 16 GiB and a minute, so it runs only when asked for: KLA_TEST_HUGE=1.
"""

import os

import pytest
import torch

from kalman_attention.ops import cpu
from kalman_attention.ops.contract import ScanInputs

pytestmark = [
    pytest.mark.skipif("KLA_TEST_HUGE" not in os.environ, reason="set KLA_TEST_HUGE=1 to run"),
    pytest.mark.skipif(cpu.why_not() is not None, reason=str(cpu.why_not())),
]

B, T, D, N = 17, 131_072, 1024, 1


@pytest.fixture(autouse=True)
def _plain_memory() -> None:
    # Filling this much memory with NaN first would take longer than the scan.
    torch.use_deterministic_algorithms(False)


def one_row() -> ScanInputs:
    generator = torch.Generator().manual_seed(0)

    def tokens(width: int) -> torch.Tensor:
        return torch.rand(1, T, width, generator=generator).to(torch.bfloat16)

    dynamics = torch.full((N, D), 0.9), torch.full((N, D), 0.01)
    belief = torch.zeros(1, N, D), torch.ones(1, N, D)
    return ScanInputs(tokens(N), tokens(N), tokens(D), tokens(D), *dynamics, *belief, None, None)


def repeated(row: ScanInputs) -> ScanInputs:
    """The same row B times, by a stride of 0."""
    tokens = (x.expand(B, -1, -1) for x in row[:4])
    belief = (x.expand(B, -1, -1) for x in row[6:8])
    return ScanInputs(*tokens, row.a_bar, row.p_bar, *belief, None, None)


def test_every_row_of_a_huge_call_equals_the_row_alone() -> None:
    assert B * T * D > 2**31
    row = one_row()
    alone = cpu.forward(row, return_variance=False, save=True)
    huge = cpu.forward(repeated(row), return_variance=False, save=True)
    assert all(torch.equal(y, alone.y[0]) for y in huge.y)
    assert all(torch.equal(mean, alone.mean[0]) for mean in huge.mean)
    checkpoints = huge.checkpoints
    del huge
    dy = torch.ones(1, T, 1, dtype=torch.bfloat16).expand(1, T, D).contiguous()
    wanted = cpu.backward(row, alone.checkpoints, dy, None, None, None)
    got = cpu.backward(repeated(row), checkpoints, dy.expand(B, -1, -1), None, None, None)
    for name in ("q", "k", "v", "lam_v", "mean_0", "variance_0"):
        assert all(torch.equal(x, getattr(wanted, name)[0]) for x in getattr(got, name)), name
    torch.testing.assert_close(got.a_bar, B * wanted.a_bar, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.p_bar, B * wanted.p_bar, rtol=1e-5, atol=0)
