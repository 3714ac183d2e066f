"""What the tests of the matrix-valued mixers share: comparing two forms of one recurrence."""

import torch

LENGTHS = [0, 1, 2, 3, 5, 8, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 133]
"""From nothing to two chunks and a bit."""


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
    import importlib.util
    from pathlib import Path

    import pytest

    package = importlib.util.find_spec("fla")
    if package is None:
        pytest.skip("needs the references of flash-linear-attention: pip install fla-core")
    # The package itself imports triton; the file with the references does not.
    path = Path(package.submodule_search_locations[0]) / "ops" / family / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_{family}_naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
