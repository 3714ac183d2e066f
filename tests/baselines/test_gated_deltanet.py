"""Gated DeltaNet: the triangular solve is the recurrence, and both are the public ones."""

import pytest
import torch
from torch import nn

from kalman_attention.baselines.gated_deltanet import (
    DeltaDecay,
    GatedDeltaNet,
    GatedDeltaNetConfig,
    delta_chunked,
    delta_recurrence,
)
from kalman_attention.benchmarks.mixers import hidden
from tests.baselines.rules import assert_same_rule, delta_inputs, naive


def test_recurrence_is_what_it_says():
    # The published line, as it is printed: with matrices, transposed.
    data = delta_inputs(6, B=1, H=1)
    q, k, v, log_alpha, beta = (x[0, :, 0] for x in data[:5])
    S, alpha, expected = data[5][0, 0].T, log_alpha.exp(), []
    for t in range(6):
        erase = torch.eye(3, dtype=S.dtype) - beta[t] * torch.outer(k[t], k[t])
        S = alpha[t] * S @ erase + beta[t] * torch.outer(v[t], k[t])
        expected.append(S @ q[t])
    y, last = delta_recurrence(*data)
    torch.testing.assert_close(y[0, :, 0], torch.stack(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last[0, 0], S.T, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    data = [x.requires_grad_() for x in delta_inputs(5, B=1, H=1, K=2, V=2)]
    assert torch.autograd.gradcheck(delta_chunked, data)


@pytest.mark.parametrize("strength", [0.0, 600.0])
def test_float32_at_the_extremes(strength):
    # The same key written at full rate over and over: the system is as coupled as it can be.
    q, k, v, log_alpha, _, state = delta_inputs(130, strength=strength, dtype=torch.float32)
    k = k[:, :1].expand_as(k).contiguous()
    log_alpha[:, 20:60] = -0.01
    data = (q, k, v, log_alpha, torch.ones_like(log_alpha), state)
    assert_same_rule(delta_chunked, delta_recurrence, *data, rtol=2e-5)


def qwen_module():
    with hidden("fla"):
        return pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("name", ["torch_chunk", "torch_recurrent"])
def test_rule_of_transformers(T, name):
    qwen = qwen_module()
    q, k, v, log_alpha, beta, state = delta_inputs(T, dtype=torch.float32)
    rule = getattr(qwen, f"{name}_gated_delta_rule")
    y, last = rule(q, k, v, log_alpha, beta, initial_state=state, output_final_state=True)
    found, matrix = delta_chunked(q / q.shape[-1] ** 0.5, k, v, log_alpha, beta, state)
    torch.testing.assert_close(found, y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(matrix, last, rtol=1e-5, atol=1e-5)


def test_rule_of_flash_linear_attention():
    pytest.importorskip("einops")
    q, k, v, log_alpha, beta, state = delta_inputs(70, dtype=torch.float32)
    rule = naive("gated_delta_rule").naive_recurrent_gated_delta_rule
    y, last = rule(q, k, v, beta, log_alpha, initial_state=state, output_final_state=True)
    found, matrix = delta_chunked(q / q.shape[-1] ** 0.5, k, v, log_alpha, beta, state)
    torch.testing.assert_close(found, y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(matrix, last, rtol=1e-5, atol=1e-5)


def qwen_layer():
    """A layer of transformers, and ours with its weights."""
    qwen = qwen_module()
    torch.manual_seed(0)
    config = qwen.Qwen3NextConfig(
        hidden_size=32,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=12,
        linear_value_head_dim=24,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-5,
    )
    theirs = qwen.Qwen3NextGatedDeltaNet(config, 0).eval()
    nn.init.normal_(theirs.norm.weight)
    ours = GatedDeltaNet(GatedDeltaNetConfig(d_model=32, num_heads=2))
    with torch.no_grad():
        # Theirs sorts the rows by head, then by what they are.
        heads = theirs.in_proj_qkvz.weight.unflatten(0, (2, -1)).split([12, 12, 24, 24], 1)
        rates = theirs.in_proj_ba.weight.unflatten(0, (2, 2)).split([1, 1], 1)
        ours.in_proj.weight.copy_(torch.cat([part.flatten(0, 1) for part in (*heads, *rates)]))
        ours.conv.weight.copy_(theirs.conv1d.weight.squeeze(1).T)
        ours.decay.A_log.copy_(theirs.A_log)
        ours.decay.dt_bias.copy_(theirs.dt_bias)
    ours.norm.load_state_dict(theirs.norm.state_dict())
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    return theirs, ours


@pytest.mark.parametrize("T", [1, 3, 70])
def test_layer_of_transformers(T):
    theirs, ours = qwen_layer()
    x = torch.randn(2, T, 32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_layer_of_transformers_has_the_same_gradients():
    theirs, ours = qwen_layer()
    x = torch.randn(2, 40, 32, requires_grad=True)
    found, expected = (torch.autograd.grad(y.square().sum(), x)[0] for y in (ours(x), theirs(x)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_decays_start_as_published():
    torch.manual_seed(0)
    decay = DeltaDecay(2000)
    A, dt = decay.A_log.detach().exp(), nn.functional.softplus(decay.dt_bias.detach())
    assert 0.0 < float(A.min()) < 0.1
    assert 15.9 < float(A.max()) <= 16.001
    assert 0.0009 < float(dt.min()) < 0.0011
    assert 0.09 < float(dt.max()) < 0.1001
    assert abs(float(dt.log().mean()) - float(torch.tensor(0.01).log())) < 0.1


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"d_model": 128, "expand_k": 0.5, "expand_v": 1.0}, 2048),
        ({"d_model": 64, "num_heads": 2}, 2304),
        ({"d_model": 128, "num_heads": 4}, 4608),
        ({"d_model": 256, "num_heads": 8}, 9216),
    ],
)
def test_state_sizes_of_the_paper(options, size):
    config = GatedDeltaNetConfig(**options)
    assert config.state_size == size
    assert GatedDeltaNet(config).init_state(1).matrix.numel() == size
    if "expand_k" not in options:
        assert (config.key_dim, config.value_dim) == (24, 48)


def test_refusals():
    with pytest.raises(ValueError, match="Choose another expand_k"):
        GatedDeltaNetConfig(d_model=30, num_heads=4)
    with pytest.raises(ValueError, match="kernel_size must be at least 1"):
        GatedDeltaNet(GatedDeltaNetConfig(d_model=32, conv_kernel=0))
