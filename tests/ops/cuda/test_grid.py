"""The cut of a call follows from its shape, and every part of it is covered once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kalman_attention.ops.contract import CHUNK, ScanInputs
from kalman_attention.ops.cuda import grid
from kalman_attention.ops.cuda.program import GROUP_SIZES
from tests.systems import examples


def shaped(B: int, T: int, N: int, D: int, rows: int | None = None, share: int = 1) -> ScanInputs:
    """Inputs without memory behind them."""
    tokens = [torch.empty(B, T, x, device="meta") for x in (N, N, D, D)]
    lanes = [torch.empty(N // share, D, device="meta")] * 2
    beliefs = [torch.empty(rows or B, x, D, device="meta") for x in (N, N // share)]
    borders = None if rows is None else torch.empty(rows + 1, dtype=torch.int64, device="meta")
    return ScanInputs(*tokens, *lanes, *beliefs, None, borders)


@pytest.fixture(autouse=True)
def _rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "SCHEDULE", "auto")


def test_a_full_batch_is_lane_serial_and_a_long_row_is_split() -> None:
    batch = grid.forward_grid(shaped(16, 4096, 16, 1024))
    assert batch.segments == 16
    assert not batch.split(16)
    prefill = grid.forward_grid(shaped(1, 4096, 16, 1024))
    assert prefill.segments == 16
    assert prefill.span == 256
    assert prefill.split(1)
    assert not grid.forward_grid(shaped(1, 400, 16, 1024)).split(1)


def test_packed_documents_are_split_by_the_length_of_the_row() -> None:
    packed = grid.forward_grid(shaped(1, 8192, 16, 256, rows=5))
    assert packed.segments == 8192 // packed.span + 5
    assert packed.split(5)


@examples(200)
@given(
    B=st.integers(1, 40),
    T=st.integers(0, 10**6),
    G=st.integers(1, 300),
    share=st.sampled_from([1, 1, 2, 3, 16, 64]),
    D=st.integers(1, 5000),
    double=st.booleans(),
)
def test_every_lane_and_token_has_a_place(
    B: int, T: int, G: int, share: int, D: int, double: bool
) -> None:
    dtype = torch.float64 if double else torch.float32
    inputs = shaped(B, T, G * share, D, share=share)
    for cut in (grid.forward_grid(inputs), grid.backward_grid(inputs, dtype)):
        assert cut.group in GROUP_SIZES
        assert cut.group * cut.channels == cut.threads
        assert (cut.blocks - 1) * cut.channels < D <= cut.blocks * cut.channels
        assert cut.places >= share
        assert cut.slots % cut.places == 0  # no block of slots is torn
        assert cut.slots >= G * cut.places or cut.slots in (64, 128)
        assert cut.span % CHUNK == 0
        per_row = cut.segments // B
        assert per_row * B == cut.segments
        assert per_row * cut.span >= T
        assert per_row == 1 or (per_row - 1) * cut.span < T
        assert per_row == 1 or (cut.span >= grid.MIN_SPAN and per_row >= grid.MIN_SEGMENTS)
