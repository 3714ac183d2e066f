"""Norms and links: values, gradients at the edges, dtypes."""

import pytest
import torch

from kalman_attention.nn.links import inverse_softplus, log_uniform, value_precision
from kalman_attention.nn.norms import RMSNorm, l2_norm, rms_norm


def test_rms_norm():
    x = torch.randn(3, 8, dtype=torch.float64)
    norm = RMSNorm(8).double()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x), expected)
    assert rms_norm(x.bfloat16(), norm.weight).dtype == torch.bfloat16


def test_l2_norm_has_a_gradient_at_zero():
    x = torch.zeros(2, 4, requires_grad=True)
    y = l2_norm(x)
    y.sum().backward()
    assert bool((y == 0).all())
    assert bool(x.grad.isfinite().all())
    torch.testing.assert_close(l2_norm(torch.randn(5, 4)).norm(dim=-1), torch.ones(5))


@pytest.mark.parametrize("link", ["inverse_softplus", "softplus", "exp"])
def test_precision_is_positive_and_alive(link):
    x = torch.tensor([-30.0, -1.0, 0.0, 1.0, 30.0], requires_grad=True)
    lam = value_precision(x, link, 1e-4)
    lam.sum().backward()
    assert bool((lam > 0).all())
    assert bool(lam.isfinite().all())
    assert bool((x.grad != 0).all())
    assert value_precision(x.bfloat16(), link, 1e-4).dtype == torch.float32


def test_inverse_softplus():
    y = torch.tensor([1e-4, 1e-2, 1.0, 30.0], dtype=torch.float64)
    torch.testing.assert_close(torch.nn.functional.softplus(inverse_softplus(y)), y)


def test_log_uniform_stays_in_its_range():
    x = log_uniform((1000,), 1e-3, 1e-1, torch.float64)
    assert 1e-3 <= x.min() < 2e-3
    assert 5e-2 < x.max() <= 1e-1
    assert 0.005 < x.median() < 0.02
