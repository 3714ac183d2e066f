"""Gated linear attention: the chunked form is the recurrence, however strong the decay."""

import pytest
import torch
from torch import nn

from kalman_attention.baselines.gla import GLA, GLAConfig, gla_chunked, gla_recurrence
from tests.baselines.rules import assert_same_rule, gla_inputs, naive


def dense(q, k, v, log_alpha, state):
    """No recurrence: the decay between two tokens is summed from its definition."""
    T = q.shape[1]
    y = torch.zeros_like(v)
    for i in range(T):
        seen = log_alpha[:, : i + 1].sum(1).exp() * q[:, i]
        y[:, i] = torch.einsum("bhk,bhkv->bhv", seen, state)
        for j in range(i + 1):
            decay = log_alpha[:, j + 1 : i + 1].sum(1).exp()
            weight = (q[:, i] * decay * k[:, j]).sum(-1, keepdim=True)
            y[:, i] = y[:, i] + weight * v[:, j]
    return y


def test_recurrence_is_what_it_says():
    data = gla_inputs(7)
    torch.testing.assert_close(gla_recurrence(*data)[0], dense(*data), rtol=1e-12, atol=1e-12)


def test_gradcheck():
    data = [x.requires_grad_() for x in gla_inputs(5, B=1, H=1, K=2, V=2)]
    assert torch.autograd.gradcheck(gla_chunked, data)


def test_decay_whose_inverse_overflows():
    # exp(-cumulative sum) is infinite in float32 after a few tokens; then the gate opens again,
    # which a difference of the large sums would see with three digits.
    q, k, v, log_alpha, state = gla_inputs(130, strength=600.0, dtype=torch.float32)
    log_alpha[:, 20:60] = -0.01
    assert bool((-log_alpha.cumsum(1)).exp().isinf().any())
    data = (q, k, v, log_alpha, state)
    assert_same_rule(gla_chunked, gla_recurrence, *data, rtol=1e-5)
    exact, _ = gla_recurrence(*(x.double() for x in data))
    torch.testing.assert_close(gla_chunked(*data)[0].double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T", [1, 70])
def test_public_recurrence(T):
    q, k, v, log_alpha, state = gla_inputs(T, dtype=torch.float32)
    # It divides the query by sqrt(K) itself, and computes in float32.
    y, last = naive("gla").naive_recurrent_gla(q, k, v, log_alpha, state.clone(), True)
    found, matrix = gla_chunked(q / q.shape[-1] ** 0.5, k, v, log_alpha, state)
    torch.testing.assert_close(found, y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(matrix, last, rtol=1e-5, atol=1e-5)


def test_layer_around_the_public_recurrence():
    torch.manual_seed(0)
    layer, x = GLA(GLAConfig(d_model=32, num_heads=4)), torch.randn(2, 70, 32)
    nn.init.normal_(layer.norm.weight)
    queries, keys, values, gates = layer.in_proj.weight.split([16, 16, 32, 32])
    logits = nn.functional.linear(x @ layer.decay_down.weight.T, layer.decay_up.weight)
    log_alpha = nn.functional.logsigmoid(logits + layer.decay_up.bias) / 16
    heads = [(x @ w.T).reshape(2, 70, 4, -1) for w in (queries, keys, values)]
    y, _ = naive("gla").naive_recurrent_gla(*heads, log_alpha.reshape(2, 70, 4, -1))
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight
    y = (y.flatten(2) * nn.functional.silu(x @ gates.T)) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"d_model": 128}, 2048),
        ({"d_model": 64, "expand_k": 1.0}, 1024),
        ({"d_model": 128, "expand_k": 0.5}, 2048),
        ({"d_model": 256, "expand_k": 0.25}, 4096),
    ],
)
def test_state_sizes_of_the_paper(options, size):
    config = GLAConfig(**options)
    assert config.state_size == size
    assert GLA(config).init_state(1).matrix.numel() == size


def test_refusals():
    with pytest.raises(ValueError, match="Choose another expand_k"):
        GLAConfig(d_model=30, num_heads=4)
    with pytest.raises(ValueError, match="gate_low_rank_dim must be at least 1"):
        GLAConfig(d_model=32, gate_low_rank_dim=0)
    with pytest.raises(ValueError, match="num_heads must be at least 1"):
        GLAConfig(d_model=32, num_heads=0)
