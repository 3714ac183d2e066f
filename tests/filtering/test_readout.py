"""``filtering/readout.py``: mean and variance of what the query asks."""

import torch

from kalman_attention.filtering.readout import read_mean, read_variance, sample_readout
from tests.oracles import oracle_beliefs, oracle_readout
from tests.systems import assert_close, random_state, random_system


def test_readout_of_the_oracle():
    x, state = random_system(), random_state()
    beliefs = oracle_beliefs(x.k, x.v, x.lam_v, x.a_bar, x.p_bar, state)
    y, y_var = oracle_readout(x.q, beliefs)
    assert_close(read_mean(x.q, beliefs.mean), y)
    assert_close(read_variance(x.q, beliefs.variance), y_var)


def test_readout_is_the_moments_of_a_linear_map():
    # y = sum_n q_n z_n with independent z_n: mean q . m, variance q' diag(s) q.
    q = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    state = random_state(rows=1, N=3, D=2)
    for d in range(2):
        mean, variance = state.mean[0, :, d], state.variance[0, :, d]
        assert_close(read_mean(q, state.mean[0])[d], q @ mean)
        assert_close(read_variance(q, state.variance[0])[d], q @ variance.diag() @ q)


def test_one_slot_is_the_product():
    x, state = random_system(N=1, T=1), random_state(N=1)
    assert_close(read_mean(x.q[:, 0], state.mean), x.q[:, 0] * state.mean[:, 0])


def test_draws_have_the_moments_of_the_posterior():
    y = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    y_var = torch.tensor([0.25, 4.0, 0.0], dtype=torch.float64)
    noise = torch.randn(200_000, 3, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
    draws = sample_readout(y, y_var, noise)
    torch.testing.assert_close(draws.mean(0), y, rtol=0.0, atol=0.02)
    torch.testing.assert_close(draws.var(0), y_var, rtol=0.02, atol=0.0)
    assert bool((draws[:, 2] == 0.5).all())  # no doubt, no draw


def test_slopes_of_a_draw_are_finite_without_variance():
    y = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    y_var = torch.tensor([0.0, 4.0], dtype=torch.float64, requires_grad=True)
    noise = torch.tensor([3.0, 3.0], dtype=torch.float64)
    sample_readout(y, y_var, noise).sum().backward()
    assert y.grad.tolist() == [1.0, 1.0]
    assert y_var.grad.tolist() == [0.0, 3.0 / (2 * 2.0)]
