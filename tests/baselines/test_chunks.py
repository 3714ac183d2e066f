"""Every chunked form is its readable recurrence, in values and in all gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention.baselines.common import chunk_size, from_chunks, segment_sums, to_chunks
from kalman_attention.baselines.gated_deltanet import delta_chunked, delta_recurrence
from kalman_attention.baselines.gla import gla_chunked, gla_recurrence
from kalman_attention.baselines.mlstm import mlstm_chunked, mlstm_recurrence
from tests.baselines.rules import assert_same_rule, delta_inputs, gla_inputs, mlstm_inputs

RULES = {
    "gla": (gla_chunked, gla_recurrence, gla_inputs),
    "delta": (delta_chunked, delta_recurrence, delta_inputs),
    "mlstm": (mlstm_chunked, mlstm_recurrence, mlstm_inputs),
}
every_rule = pytest.mark.parametrize("name", RULES)


@every_rule
@pytest.mark.parametrize("T", range(36))
def test_every_length_up_to_two_chunks_and_a_bit(name, T):
    chunked, recurrence, inputs = RULES[name]
    assert chunk_size(100, 3, 5) == 16
    assert_same_rule(chunked, recurrence, *inputs(T))


@every_rule
@pytest.mark.parametrize(("size", "longest"), [(64, 32), (128, 64)])
@pytest.mark.parametrize("over", [-1, 0, 1, 9])
def test_longer_chunks_of_wide_heads(name, size, longest, over):
    chunked, recurrence, inputs = RULES[name]
    assert chunk_size(1000, size, size) == longest
    assert_same_rule(chunked, recurrence, *inputs(2 * longest + over, 1, 1, size, size))


@every_rule
@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(0, 80),
    H=st.integers(1, 3),
    K=st.integers(1, 40),
    V=st.integers(1, 4),
    strength=st.sampled_from([0.0, 1e-3, 1.0, 40.0, 1e3]),
    seed=st.integers(0, 99),
)
def test_any_shape_and_strength(name, T, H, K, V, strength, seed):
    chunked, recurrence, inputs = RULES[name]
    # Rounding over a denominator near 0 has no bound, so none is drawn here: a random search
    # finds it. The tests above, at fixed seeds, have both signs.
    options = {"positive": True} if name == "mlstm" else {}
    data = inputs(T, 1, H, K, V, strength, seed=seed, **options)
    assert_same_rule(chunked, recurrence, *data)


@every_rule
def test_autocast_changes_nothing(name):
    chunked, recurrence, inputs = RULES[name]
    data = inputs(20, dtype=torch.float32)
    for rule in (chunked, recurrence):
        expected = rule(*data)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = rule(*data)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_chunks_and_back():
    x = torch.randn(2, 37, 3, 5)
    chunks = to_chunks(x, 16, fill=7.0)
    assert chunks.shape == (2, 3, 3, 16, 5)
    assert bool((chunks[:, :, 2, 5:] == 7.0).all())
    assert torch.equal(from_chunks(chunks, 37), x)
    assert to_chunks(x[:, :0], 1).shape == (2, 3, 1, 1, 5)


def test_short_sums_beside_long_ones_keep_their_digits():
    x = torch.tensor([-1e6, -0.125, -0.25, -1e7, -0.5])
    sums = segment_sums(x)
    assert sums[2].tolist() == [-0.375, -0.25, 0.0, -torch.inf, -torch.inf]
    assert float(sums[4, 3]) == -0.5
