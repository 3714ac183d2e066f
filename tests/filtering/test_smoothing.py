"""Smoothing against dense conditioning on all tokens, which knows nothing of filtering."""

import itertools

import numpy as np
import pytest
import torch

from kalman_attention.filtering import moment
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.smoothing import Future, smooth, step_back
from tests.oracles import joint_prior
from tests.systems import System, assert_close, random_state, random_system


def smoothed_path(x: System, state: KLAState) -> KLAState:
    """The smoothed belief at every token, ``[B, T, N, D]``, by a loop each way."""
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    T = x.v.shape[1]
    filtered = []
    for t in range(T):
        state = moment.step(state, x.a_bar, x.p_bar, phi[:, t], b[:, t])
        filtered.append(state)
    future = Future.nothing_like(state)
    found = []
    for t in reversed(range(T)):
        found.append(smooth(filtered[t], future))
        future = step_back(future, x.a_bar, x.p_bar, phi[:, t], b[:, t])
    return KLAState(*(torch.stack(part, 1) for part in zip(*reversed(found), strict=True)))


def dense_path(x: System, state: KLAState) -> KLAState:
    """The same by conditioning one joint Gaussian of latents and all values."""
    (B, T, D), N = x.v.shape, x.k.shape[-1]
    mean, variance = np.empty((2, B, T, N, D))
    for i, n, d in itertools.product(range(B), range(N), range(D)):
        a, p = np.full(T, x.a_bar[n, d].item()), np.full(T, x.p_bar[n, d].item())
        start = state.mean[i, n, d].item(), state.variance[i, n, d].item()
        z_mean, z_cov = joint_prior(a, p, *start)
        seen = np.flatnonzero(x.lam_v[i, :, d].numpy() > 0)
        k, v, lam = (z.numpy()[seen] for z in (x.k[i, :, n], x.v[i, :, d], x.lam_v[i, :, d]))
        v_cov = np.outer(k, k) * z_cov[np.ix_(seen + 1, seen + 1)] + np.diag(1.0 / lam)
        cross = z_cov[1:, seen + 1] * k
        weights = np.linalg.solve(v_cov, cross.T).T
        mean[i, :, n, d] = z_mean[1:] + weights @ (v - k * z_mean[seen + 1])
        variance[i, :, n, d] = np.diag(z_cov[1:, 1:]) - (weights * cross).sum(1)
    return KLAState(torch.from_numpy(mean), torch.from_numpy(variance))


@pytest.mark.parametrize("case", ["plain", "no noise", "no decay", "gaps"])
def test_smoothing_is_conditioning_on_all_tokens(case: str) -> None:
    x = random_system(B=2, T=9, seed=3)
    if case == "no noise":
        x = x._replace(p_bar=torch.zeros_like(x.p_bar))
    if case == "no decay":
        x = x._replace(a_bar=torch.ones_like(x.a_bar))
    if case == "gaps":
        x = x._replace(lam_v=torch.where(torch.arange(9)[:, None] % 3 == 0, x.lam_v, 0.0))
    state = random_state()
    assert_close(smoothed_path(x, state), dense_path(x, state), rtol=1e-11, atol=1e-12)


def test_the_last_token_has_no_future() -> None:
    x, state = random_system(T=5), random_state()
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    filtered = state
    for t in range(5):
        filtered = moment.step(filtered, x.a_bar, x.p_bar, phi[:, t], b[:, t])
    last = KLAState(*(part[:, -1] for part in smoothed_path(x, state)))
    assert torch.equal(last.mean, filtered.mean)
    assert torch.equal(last.variance, filtered.variance)


def test_smoothing_only_ever_makes_surer() -> None:
    x, state = random_system(T=12, seed=8), random_state()
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    found = smoothed_path(x, state)
    for t in range(12):
        state = moment.step(state, x.a_bar, x.p_bar, phi[:, t], b[:, t])
        assert bool((found.variance[:, t] <= state.variance).all())
