"""Smoke: is anything alive? Runs first, in about a second."""

import torch

from kalman_attention import discretise, kla_scan, kla_scan_ref


def test_scan_and_gradient():
    torch.manual_seed(0)
    B, T, N, D = 2, 5, 3, 4
    v, lam_v = torch.randn(B, T, D, requires_grad=True), torch.rand(B, T, D)
    k, q = torch.randn(B, T, N), torch.randn(B, T, N)
    a_bar, p_bar = discretise(torch.rand(N, D), torch.full((N, D), 0.3), torch.full((N, D), 0.1))
    out = kla_scan(q, k, v, lam_v, a_bar, p_bar, return_variance=True)
    expected = kla_scan_ref(q, k, v, lam_v, a_bar, p_bar, return_variance=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    for result in (out, expected):
        assert (result.y_var > 0).all()
    grads = [torch.autograd.grad(x.y.square().sum(), v)[0] for x in (out, expected)]
    assert grads[0].any()
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
