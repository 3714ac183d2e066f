"""What the tests of the matrix-valued mixers share: comparing two forms of one recurrence."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn


def draw(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def gla_inputs(T, B=2, H=2, K=3, V=5, strength=1.0, dtype=torch.float64, seed=0):
    keys = (B, T, H, K)
    q, k, v, gate, state = draw(keys, keys, (B, T, H, V), keys, (B, H, K, V), seed=seed)
    return tuple(x.to(dtype) for x in (q, k, v, -strength * gate.abs(), state))


def delta_inputs(T, B=2, H=2, K=3, V=5, strength=1.0, dtype=torch.float64, seed=0):
    keys, gates = (B, T, H, K), (B, T, H)
    q, k, v, gate, rate, state = draw(
        keys, keys, (B, T, H, V), gates, gates, (B, H, K, V), seed=seed
    )
    q, k = (nn.functional.normalize(x, dim=-1) for x in (q, k))
    beta = (strength * rate).sigmoid()  # the stronger, the closer to 0 and 1
    return tuple(x.to(dtype) for x in (q, k, v, -strength * gate.abs(), beta, state))


def mlstm_inputs(T, B=2, H=2, K=3, V=5, strength=1.0, dtype=torch.float64, seed=0, positive=False):
    """With ``positive``, no terms of the denominator n . q cancel, nor is any of them near 0."""
    keys, gates = (B, T, H, K), (B, T, H)
    q, k, v, log_i, forget, state, m = draw(
        keys, keys, (B, T, H, V), gates, gates, (B, H, K, V + 1), (B, H), seed=seed
    )
    if positive:
        q, k = q.abs() + 0.1, k.abs() + 0.1
        state = torch.cat([state[..., :-1], state[..., -1:].abs() + 0.1], -1)
    log_f = nn.functional.logsigmoid(3 + strength * forget)
    return tuple(x.to(dtype) for x in (q, k, v, strength * log_i, log_f, state, m))


def with_gradients(rule, *inputs):
    """Outputs, last state and the gradient of every input, for fixed random cotangents."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    found = rule(*inputs)
    generator = torch.Generator().manual_seed(5)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).sum()
        for x in found
        if x.requires_grad
    )
    return [
        *(x.detach() for x in found),
        *torch.autograd.grad(loss, inputs, materialize_grads=True),
    ]


def assert_same_rule(first, second, *inputs, rtol=1e-10):
    """Values and gradients agree within ``rtol`` of the largest entry of them all.

    (Of them all, because a gradient can be 0 but for rounding: that of a decay, say, where the
    state is overwritten altogether.)
    """
    found, expected = with_gradients(first, *inputs), with_gradients(second, *inputs)
    scale = max(float(x.abs().max()) for x in expected if x.numel())
    for one, other in zip(found, expected, strict=True):
        assert bool(other.isfinite().all())
        torch.testing.assert_close(one, other, rtol=0.0, atol=rtol * scale)


def naive(family):
    """The readable references of flash-linear-attention: plain torch, without its kernels."""
    package = importlib.util.find_spec("fla")
    if package is None:
        pytest.skip("needs the references of flash-linear-attention: pip install fla-core")
    # The package itself imports triton; the file with the references does not.
    path = Path(package.submodule_search_locations[0]) / "ops" / family / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_{family}_naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
