"""``filtering/readout.py``: mean and variance of what the query asks."""

import torch

from kalman_attention.filtering.readout import read_mean, read_variance
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
