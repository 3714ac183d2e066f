"""Innovations against the dense marginal of all values, and against a filter we did not write."""

import itertools

import numpy as np
import pytest
import torch

from kalman_attention.filtering import moment
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.innovation import log_likelihood, noise_scale, normalised_innovation
from kalman_attention.filtering.moment import KLAState
from tests.oracles import joint_prior
from tests.systems import System, assert_close, random_state, random_system


def total_log_likelihood(x: System, state: KLAState) -> torch.Tensor:
    """Summed over tokens, ``[B, N, D]``."""
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    total = torch.zeros_like(state.mean)
    for t in range(x.v.shape[1]):
        prior = moment.predict(state, x.a_bar, x.p_bar)
        total = total + log_likelihood(prior, x.k[:, t], x.v[:, t], x.lam_v[:, t])
        state = moment.update(prior, phi[:, t], b[:, t])
    return total


def test_the_sum_is_the_log_density_of_all_values() -> None:
    x, state = random_system(T=6, seed=4), random_state()
    (B, T, D), N = x.v.shape, x.k.shape[-1]
    expected = torch.empty(B, N, D, dtype=torch.float64)
    for i, n, d in itertools.product(range(B), range(N), range(D)):
        a, p = np.full(T, x.a_bar[n, d].item()), np.full(T, x.p_bar[n, d].item())
        start = state.mean[i, n, d].item(), state.variance[i, n, d].item()
        z_mean, z_cov = joint_prior(a, p, *start)
        k, v, lam = (z.numpy() for z in (x.k[i, :, n], x.v[i, :, d], x.lam_v[i, :, d]))
        cov = np.outer(k, k) * z_cov[1:, 1:] + np.diag(1.0 / lam)
        e = v - k * z_mean[1:]
        _, log_det = np.linalg.slogdet(2.0 * np.pi * cov)
        expected[i, n, d] = -0.5 * (log_det + e @ np.linalg.solve(cov, e))
    assert_close(total_log_likelihood(x, state), expected, rtol=1e-11, atol=1e-12)


def test_a_token_without_evidence_counts_nothing_whatever_its_value() -> None:
    x, state = random_system(), random_state()
    v = torch.full_like(x.v[:, 0], torch.nan).requires_grad_()
    lam_v = torch.zeros_like(v)
    density = log_likelihood(state, x.k[:, 0], v, lam_v)
    assert torch.equal(density, torch.zeros_like(density))
    density.sum().backward()
    assert v.grad is not None
    assert torch.equal(v.grad, torch.zeros_like(v))


def test_gradients() -> None:
    x, state = random_system(B=1, T=4, N=1), random_state(rows=1, N=1)
    inputs = [z.clone().requires_grad_() for z in (*x[1:], *state)]

    def total(*z: torch.Tensor) -> torch.Tensor:
        return total_log_likelihood(System(x.q, *z[:5]), KLAState(*z[5:]))

    assert torch.autograd.gradcheck(total, inputs)


def test_a_local_level_model_of_filterpy() -> None:
    kalman = pytest.importorskip(
        "filterpy.kalman", reason="filterpy is not installed: pip install 'kalman_attention[dev]'"
    )
    g = torch.Generator().manual_seed(0)
    T, noise, drift = 40, 0.7, 0.2
    level = (drift**0.5 * torch.randn(T, generator=g, dtype=torch.float64)).cumsum(0)
    v = level + noise**0.5 * torch.randn(T, generator=g, dtype=torch.float64)
    theirs = kalman.KalmanFilter(dim_x=1, dim_z=1)
    theirs.x, theirs.P = np.zeros((1, 1)), np.array([[10.0]])
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    state, lam = KLAState(zero, zero + 10.0), one / noise
    for t in range(T):
        prior = moment.predict(state, zero + 1.0, zero + drift)
        theirs.predict(F=np.eye(1), Q=drift)
        theirs.update(v[t].item(), R=noise, H=np.eye(1))
        ours = log_likelihood(prior, one, v[t : t + 1], lam)
        assert ours.item() == pytest.approx(theirs.log_likelihood, rel=1e-12)
        square = normalised_innovation(prior, one, v[t : t + 1], lam)
        surprise = theirs.y.item() ** 2 / theirs.S.item()
        assert square.item() == pytest.approx(surprise, rel=1e-10, abs=1e-14)
        phi, b = token_evidence(one, v[t : t + 1], lam)
        state = moment.update(prior, phi, b)


def one_slot(T: int) -> tuple[System, KLAState]:
    return random_system(B=1, T=T, N=1, D=1, seed=7), random_state(rows=1, N=1, D=1)


def predictive_densities(
    x: System, state: KLAState
) -> tuple[torch.Tensor, list[tuple[float, float]]]:
    """Normalised innovations ``[1, T, 1, 1]``; error and variance of every one-step prediction."""
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    normalised, moments = [], []
    for t in range(x.v.shape[1]):
        prior = moment.predict(state, x.a_bar, x.p_bar)
        normalised.append(normalised_innovation(prior, x.k[:, t], x.v[:, t], x.lam_v[:, t]))
        k = x.k[0, t, 0]
        error = x.v[0, t, 0] - k * prior.mean[0, 0, 0]
        moments.append((float(error), float(k**2 * prior.variance[0, 0, 0] + 1 / x.lam_v[0, t, 0])))
        state = moment.update(prior, phi[:, t], b[:, t])
    return torch.stack(normalised, 1), moments


def test_the_noise_scale_makes_predictions_student_t() -> None:
    """Their product is the density of all values with the common factor integrated out."""
    stats = pytest.importorskip("scipy.stats")
    integrate = pytest.importorskip("scipy.integrate")
    freedom, (x, state) = 3.0, one_slot(T=6)
    normalised, moments = predictive_densities(x, state)
    found = noise_scale(normalised, x.lam_v, freedom=freedom)
    factors = [1.0, *found.factor[0, :-1, 0].tolist()]
    freedoms = [freedom, *found.freedom[0, :-1, 0].tolist()]
    total = sum(
        stats.t.logpdf(e, n, scale=np.sqrt(c * S))
        for (e, S), c, n in zip(moments, factors, freedoms, strict=True)
    )

    def integrand(log_c: float) -> float:
        c = np.exp(log_c)
        given = sum(stats.norm.logpdf(e, scale=np.sqrt(c * S)) for e, S in moments)
        prior = stats.invgamma.logpdf(c, freedom / 2, scale=freedom / 2)
        return float(np.exp(given + prior + log_c))

    expected, _ = integrate.quad(integrand, -12, 12, epsabs=0, epsrel=1e-11, limit=400)
    np.testing.assert_allclose(total, np.log(expected), rtol=1e-9)


def test_missing_values_leave_the_noise_scale_alone() -> None:
    x, state = one_slot(T=5)
    lam_v = x.lam_v.clone()
    lam_v[:, 2] = 0.0
    normalised, _ = predictive_densities(x._replace(lam_v=lam_v), state)
    found = noise_scale(normalised, lam_v)
    assert torch.equal(found.factor[:, 2], found.factor[:, 1])
    assert torch.equal(found.freedom[:, 2], found.freedom[:, 1])
    with pytest.raises(ValueError, match="positive"):
        noise_scale(normalised, lam_v, freedom=0.0)
