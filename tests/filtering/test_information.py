"""``filtering/information.py``: the paper's coordinates, against the dense oracle."""

import torch
from hypothesis import given

from kalman_attention.filtering import information
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.information import Information, to_information, to_moment
from tests.oracles import oracle_beliefs
from tests.systems import (
    assert_close,
    decays,
    examples,
    noises,
    precisions,
    random_state,
    random_system,
    scalars,
)


def test_to_information_and_back():
    state = random_state()
    belief = to_information(state)
    assert_close(belief.lam * state.variance, torch.ones_like(state.variance))
    assert_close(belief.eta, belief.lam * state.mean)
    assert_close(to_moment(belief), state)
    assert_close(to_information(to_moment(belief)), belief)


def test_step_against_the_oracle():
    x, state = random_system(B=2, T=8), random_state()
    beliefs = oracle_beliefs(x.k, x.v, x.lam_v, x.a_bar, x.p_bar, state)
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    belief = to_information(state)
    for t in range(8):
        belief = information.step(belief, x.a_bar, x.p_bar, phi[:, t], b[:, t])
        now = to_moment(belief)
        assert_close(now.mean, beliefs.mean[:, t], rtol=1e-11)
        assert_close(now.variance, beliefs.variance[:, t], rtol=1e-11)


def test_predict_against_the_oracle():
    x, state = random_system(T=1), random_state()
    blank = torch.zeros_like(x.lam_v)
    prior = oracle_beliefs(x.k, x.v, blank, x.a_bar, x.p_bar, state)
    predicted = to_moment(information.predict(to_information(state), x.a_bar, x.p_bar))
    assert_close(predicted.mean, prior.mean[:, 0])
    assert_close(predicted.variance, prior.variance[:, 0])


def test_update_against_the_oracle():
    # a_bar = 1 and p_bar = 0: the step is the update alone.
    x, state = random_system(T=1), random_state()
    still = torch.ones_like(x.a_bar), torch.zeros_like(x.p_bar)
    posterior = oracle_beliefs(x.k, x.v, x.lam_v, *still, state)
    phi, b = token_evidence(x.k[:, 0], x.v[:, 0], x.lam_v[:, 0])
    updated = to_moment(information.update(to_information(state), phi, b))
    assert_close(updated.mean, posterior.mean[:, 0])
    assert_close(updated.variance, posterior.variance[:, 0])


@given(scalars(1e-3, 1e3), decays, noises)
@examples(50)
def test_rho_is_the_ratio_of_predicted_to_previous_precision(lam, a_bar, p_bar):
    prior = information.predict(Information(lam, torch.ones_like(lam)), a_bar, p_bar)
    ratio = information.rho(lam, a_bar, p_bar)
    assert_close(prior.lam / lam, ratio)
    assert_close(1.0 / prior.lam, a_bar**2 / lam + p_bar, rtol=1e-13)
    assert_close(information.forget_gate(lam, a_bar, p_bar), ratio * a_bar)


@given(scalars(1e-3, 1e3), decays, noises, precisions)
@examples(50)
def test_gate_view_of_the_precision(lam, a_bar, p_bar, phi):
    new = information.step(Information(lam, lam), a_bar, p_bar, phi, phi)
    history = lam / (a_bar**2 + p_bar * lam)
    assert_close(new.lam, history + phi)


@given(scalars(1e-3, 1e3), scalars(-10, 10), decays, noises, precisions, scalars(-10, 10))
@examples(50)
def test_mean_update_is_the_forget_gate_plus_evidence(lam, eta, a_bar, p_bar, phi, b):
    new = information.step(Information(lam, eta), a_bar, p_bar, phi, b)
    assert_close(new.eta, a_bar / (a_bar**2 + p_bar * lam) * eta + b)
