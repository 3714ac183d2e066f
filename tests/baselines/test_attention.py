"""Attention as a mixer: the cache, padding and packing change nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention import Attention, AttentionConfig
from kalman_attention.baselines.attention import rotate

D_MODEL = 16


def make(**options):
    torch.manual_seed(0)
    return Attention(AttentionConfig(d_model=D_MODEL, **{"num_heads": 2, **options}))


def tokens(B, T, seed=1):
    return torch.randn(B, T, D_MODEL, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rotary_base", [10_000.0, 50.0, None])
@pytest.mark.parametrize("qk_norm", [True, False], ids=["qk-norm", "no qk-norm"])
def test_is_softmax_attention(qk_norm, rotary_base):
    layer, x = make(qk_norm=qk_norm, rotary_base=rotary_base), tokens(1, 5)
    q, k, v = layer.qkv_proj(x).unflatten(-1, (3, 2, 8)).unbind(2)
    if qk_norm:
        q, k = (z * (z.square().mean(-1, keepdim=True) + 1e-5).rsqrt() for z in (q, k))
    if rotary_base is not None:
        q, k = (rotate(z, torch.arange(5).unsqueeze(0), rotary_base) for z in (q, k))
    scores = torch.einsum("bthc,bshc->bhts", q, k) / 8**0.5
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1)
    y = torch.einsum("bhts,bshc->bthc", scores, v).flatten(2)
    torch.testing.assert_close(layer.mix(x).y, layer.out_proj(y), rtol=1e-5, atol=1e-6)


def test_rotary_positions_are_relative():
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    places = [(3, 1), (103, 101)]
    scores = [
        (rotate(q, torch.tensor([[i]]), 100.0) * rotate(k, torch.tensor([[j]]), 100.0)).sum()
        for i, j in places
    ]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"qk_norm": False}, {"rotary_base": None}], ids=str)
@pytest.mark.parametrize("capacity", [0, 5, 20])
@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_any_chunks_equal_the_whole(options, capacity, sizes):
    layer, x = make(**options), tokens(2, sum(sizes))
    with torch.no_grad():
        whole = layer.mix(x).y
        state, parts = layer.init_state(2, capacity=capacity), []
        for part in x.split(sizes, 1):
            found = layer.mix(part, state)
            state = found.state
            parts.append(found.y)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-6)
        more = tokens(2, 1, seed=7)
        stepped = layer.step(more[:, 0], state).y
        torch.testing.assert_close(
            stepped, layer.mix(torch.cat([x, more], 1)).y[:, -1], rtol=1e-5, atol=1e-6
        )


@settings(max_examples=15, deadline=None)
@given(real=st.lists(st.booleans(), min_size=1, max_size=8), warm=st.integers(0, 3))
def test_padding_anywhere_is_not_seen(real, warm):
    layer, mask = make(), torch.tensor([real])
    state = layer.mix(tokens(1, warm, seed=4)).state
    x = tokens(1, len(real)).masked_fill(~mask.unsqueeze(-1), torch.nan)
    found = layer.mix(x, state, mask)
    alone = layer.mix(x[:, mask[0]], state)
    torch.testing.assert_close(found.y[:, mask[0]], alone.y, rtol=1e-5, atol=1e-6)
    assert bool((found.y[:, ~mask[0]] == 0).all())
    after = tokens(1, 2, seed=5)
    torch.testing.assert_close(
        layer.mix(after, found.state).y, layer.mix(after, alone.state).y, rtol=1e-5, atol=1e-6
    )


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_packed_documents_are_isolated(lengths):
    layer = make()
    x = tokens(1, sum(lengths)).requires_grad_()
    borders = torch.tensor([0, *lengths]).cumsum(0)
    packed = layer.mix(x, cu_seqlens=borders)
    alone = [layer.mix(document) for document in x.split(lengths, 1)]
    y = torch.cat([found.y for found in alone], 1)
    torch.testing.assert_close(packed.y, y, rtol=1e-5, atol=1e-6)
    assert packed.state.seen.tolist() == lengths
    weight = tokens(1, sum(lengths), seed=3)
    found, expected = (
        torch.autograd.grad((z * weight).sum() + x.sum(), x)[0] for z in (packed.y, y)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rotary_base", [10_000.0, None])
def test_order_is_seen_through_positions_only(rotary_base):
    # The last token sees all others: without positions their order does not matter.
    layer, x = make(rotary_base=rotary_base), tokens(1, 6)
    shuffled = torch.cat([x[:, [3, 0, 4, 1, 2]], x[:, 5:]], 1)
    same = torch.allclose(layer.mix(x).y[:, -1], layer.mix(shuffled).y[:, -1], rtol=1e-4, atol=1e-6)
    assert same == (rotary_base is None)


def test_a_functional_cache_can_be_branched():
    layer, x = make(), tokens(1, 4)
    state = layer.mix(x).state
    first, second = tokens(1, 1, seed=2), tokens(1, 1, seed=3)
    before = layer.mix(second, state).y
    layer.mix(first, state)
    torch.testing.assert_close(layer.mix(second, state).y, before)


def test_short_types():
    layer = make().bfloat16()
    assert layer.mix(tokens(1, 4).bfloat16()).y.dtype == torch.bfloat16


def test_refusals():
    with pytest.raises(ValueError, match="Choose another num_heads"):
        AttentionConfig(d_model=16, num_heads=3)
    with pytest.raises(ValueError, match="rotary_base=None"):
        AttentionConfig(d_model=15, num_heads=3)
    assert AttentionConfig(d_model=15, num_heads=3, rotary_base=None).head_dim == 5
    with pytest.raises(ValueError, match="into one row, but the batch has 2 rows"):
        make()(tokens(2, 4), cu_seqlens=torch.tensor([0, 4]))
