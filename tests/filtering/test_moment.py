"""``filtering/moment.py``: the same filter, bounded."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kalman_attention.filtering import information, moment
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.information import to_information, to_moment
from kalman_attention.filtering.moment import KLAState
from tests.oracles import oracle_beliefs
from tests.systems import (
    assert_close,
    decays,
    examples,
    noises,
    precisions,
    random_state,
    random_system,
    reals,
    scalars,
    variances,
)


@given(reals, variances, decays, noises, precisions, reals)
@examples(200)
def test_step_equals_the_information_form(mean, variance, a_bar, p_bar, phi, b):
    state = KLAState(mean, variance)
    new = moment.step(state, a_bar, p_bar, phi, b)
    other = to_moment(information.step(to_information(state), a_bar, p_bar, phi, b))
    assert_close(new.variance, other.variance)
    # The two terms of the mean may cancel; what is exact is each term.
    size = (new.variance * b).abs() + mean.abs()
    assert_close((new.mean - other.mean) / (1e-300 + size), torch.zeros_like(mean), atol=1e-13)


def test_step_against_the_oracle():
    x, state = random_system(B=2, T=8, seed=3), random_state()
    beliefs = oracle_beliefs(x.k, x.v, x.lam_v, x.a_bar, x.p_bar, state)
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    for t in range(8):
        state = moment.step(state, x.a_bar, x.p_bar, phi[:, t], b[:, t])
        assert_close(state.mean, beliefs.mean[:, t], rtol=1e-11)
        assert_close(state.variance, beliefs.variance[:, t], rtol=1e-11)


@given(scalars(1e-3, 0.999), noises, st.lists(precisions, min_size=5, max_size=5), variances)
@examples(50)
def test_variance_is_bounded(a_bar, p_bar, phis, variance):
    bound = torch.maximum(variance, p_bar / (1 - a_bar**2))
    state = KLAState(torch.zeros_like(variance), variance)
    for phi in phis:
        state = moment.step(state, a_bar, p_bar, phi, torch.zeros_like(phi))
        assert 0 <= state.variance <= bound * (1 + 1e-12)


def test_no_noise_tends_to_certainty_where_the_precision_overflows():
    a_bar, p_bar, phi = (torch.tensor(x, dtype=torch.float64) for x in (0.5, 0.0, 1.0))
    state = KLAState(torch.tensor(3.0, dtype=torch.float64), torch.ones((), dtype=torch.float64))
    belief = to_information(state)
    for _ in range(600):
        state = moment.step(state, a_bar, p_bar, phi, phi)
        belief = information.step(belief, a_bar, p_bar, phi, phi)
    assert not belief.lam.isfinite()
    assert state.variance == 0.0
    assert state.mean.isfinite()


def test_retention_is_the_share_of_the_prior_precision():
    x, state = random_system(T=1), random_state()
    phi, b = token_evidence(x.k[:, 0], x.v[:, 0], x.lam_v[:, 0])
    prior = moment.predict(state, x.a_bar, x.p_bar)
    posterior = moment.update(prior, phi, b)
    assert_close(moment.retention(prior.variance, phi), prior.lam / posterior.lam)


def test_state_in_the_letters_of_the_paper():
    state = random_state()
    assert_close(state.lam, 1 / state.variance)
    assert_close(state.eta, state.mean / state.variance)


def test_unit_prior():
    prior = KLAState.unit_prior(4, 3, 2, dtype=torch.float64)
    assert prior.mean.shape == prior.variance.shape == (4, 3, 2)
    assert prior.mean.dtype == prior.variance.dtype == torch.float64
    assert (prior.mean == 0).all()
    assert (prior.variance == 1).all()


def test_detach_cuts_the_graph():
    state = KLAState(*(x.requires_grad_() * 2 for x in random_state()))
    detached = state.detach()
    assert state.mean.requires_grad
    assert not detached.mean.requires_grad
    assert not detached.variance.requires_grad
    assert_close(detached, KLAState(*(x.data for x in state)), rtol=0, atol=0)
