"""``filtering/evidence.py``: what one token says."""

import torch

from kalman_attention.filtering import information, moment
from kalman_attention.filtering.evidence import token_evidence, without_gaps
from tests.systems import assert_close, random_state, random_system


def test_token_evidence_is_the_pair_of_outer_products():
    x = random_system(B=2, T=5, N=3, D=4)
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    assert phi.shape == b.shape == (2, 5, 3, 4)
    for i, t, n, d in [(0, 0, 0, 0), (1, 4, 2, 3), (0, 3, 1, 2)]:
        k, lam_v, v = x.k[i, t, n], x.lam_v[i, t, d], x.v[i, t, d]
        assert_close(phi[i, t, n, d], k**2 * lam_v)
        assert_close(b[i, t, n, d], k * lam_v * v)


def test_token_evidence_is_the_log_likelihood():
    # log N(v; k z, 1 / lam_v) as a function of z: slope b - phi z.
    x = random_system(B=1, T=1, N=1, D=1)
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    z = torch.tensor(0.37, dtype=torch.float64, requires_grad=True)
    likelihood = torch.distributions.Normal(x.k[0, 0, 0] * z, x.lam_v[0, 0, 0].rsqrt())
    (slope,) = torch.autograd.grad(likelihood.log_prob(x.v[0, 0, 0]), z)
    assert_close(slope, (b - phi * z)[0, 0, 0, 0])


def test_zero_key_and_zero_precision_are_pure_prediction():
    x, state = random_system(T=1), random_state()
    silent_key = token_evidence(torch.zeros_like(x.k[:, 0]), x.v[:, 0], x.lam_v[:, 0])
    silent_value = token_evidence(x.k[:, 0], x.v[:, 0], torch.zeros_like(x.lam_v[:, 0]))
    prior = moment.predict(state, x.a_bar, x.p_bar)
    lam_prior = information.predict(information.to_information(state), x.a_bar, x.p_bar)
    for phi, b in (silent_key, silent_value):
        assert not phi.any()
        assert not b.any()
        assert_close(moment.update(prior, phi, b), prior, rtol=0, atol=0)
        assert_close(information.update(lam_prior, phi, b), lam_prior, rtol=0, atol=0)


def test_missing_values_are_left_out_and_others_kept():
    v = torch.tensor([1.0, torch.nan, torch.inf, torch.nan, 2.0])
    lam_v = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0])
    assert without_gaps(v, lam_v).tolist()[:3] == [1.0, 0.0, 0.0]
    assert without_gaps(v, lam_v)[3].isnan()
    assert without_gaps(v, lam_v)[4] == 2.0
