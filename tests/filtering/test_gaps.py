"""``filtering/gaps.py``: the prior over any length of time."""

import torch
from hypothesis import given

from kalman_attention.filtering import moment
from kalman_attention.filtering.gaps import transition, transition_adjoint
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.ou import discretise
from tests.systems import assert_close, examples, noises, reals, scalars, variances

decays = scalars(1e-3, 1.0)
gaps = scalars(0.0, 20.0)


def over(a_bar, p_bar, *lengths):
    """A belief predicted over one gap after another."""

    def run(state):
        for dt in lengths:
            step = transition(a_bar.view(1, 1), p_bar.view(1, 1), dt.view(1))
            state = moment.predict(state, *step)
        return state

    return run


@given(decays, noises, gaps, gaps, reals, variances)
@examples(200)
def test_gaps_add_up(a_bar, p_bar, first, second, mean, variance):
    state = KLAState(mean.view(1, 1), variance.view(1, 1))
    twice = over(a_bar, p_bar, first, second)(state)
    assert_close(twice, over(a_bar, p_bar, first + second)(state), rtol=1e-11, atol=1e-12)


@given(decays, noises)
@examples(100)
def test_one_unit_is_the_ordinary_step_and_none_is_no_step(a_bar, p_bar):
    dynamics = a_bar.view(1, 1), p_bar.view(1, 1)
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert_close(tuple(transition(*dynamics, one)), dynamics, rtol=1e-14)
    still = transition(*dynamics, zero)
    assert still.a.item() == 1.0
    assert still.p.item() == 0.0


@given(scalars(1e-6, 5.0), scalars(0.01, 3.0), scalars(1e-3, 2.0), gaps)
@examples(100)
def test_a_gap_is_a_longer_step_of_the_prior(a, p, unit, dt):
    found = transition(*(x.view(1, 1) for x in discretise(a, p, unit)), dt.view(1))
    wanted = discretise(a, p, unit * dt)
    assert_close(found.a.view(()), wanted[0], rtol=1e-11, atol=1e-300)
    assert_close(found.p.view(()), wanted[1], rtol=1e-9, atol=1e-15)


def test_without_decay_noise_grows_with_time():
    one = torch.ones(1, 1, dtype=torch.float64)
    found = transition(one, 0.3 * one, torch.tensor([7.0], dtype=torch.float64))
    assert_close(tuple(found), (one, 2.1 * one))


def test_a_long_gap_leads_to_the_stationary_belief():
    a_bar, p_bar = torch.tensor([[0.5]]).double(), torch.tensor([[0.75]]).double()
    state = over(a_bar[0], p_bar[0], torch.tensor(200.0).double())(KLAState(5 * p_bar, 9 * p_bar))
    assert_close(state.mean, torch.zeros_like(p_bar))
    assert_close(state.variance, p_bar / (1 - a_bar**2))


def test_the_adjoint_is_that_of_autograd():
    g = torch.Generator().manual_seed(0)
    # From no decay at all through the border of the series to a strong one.
    a_bar = torch.tensor([[1.0, 1 - 1e-9, 1 - 1e-4], [0.97, 0.78, 0.01]], dtype=torch.float64)
    p_bar = torch.rand(2, 3, generator=g, dtype=torch.float64)
    da, dp = torch.randn(2, 4, 2, 3, generator=g, dtype=torch.float64)
    for width in (1, 3):
        dt = 3.0 * torch.rand(4, width, generator=g, dtype=torch.float64)
        dt[0] = 0.0
        leaves = [x.clone().requires_grad_() for x in (a_bar, p_bar, dt)]
        wanted = torch.autograd.grad(tuple(transition(*leaves)), leaves, (da, dp))
        in_a, in_p, ddt = transition_adjoint(a_bar, p_bar, dt, da, dp)
        assert_close((in_a.sum(0), in_p.sum(0), ddt), wanted, rtol=1e-9, atol=1e-11)
