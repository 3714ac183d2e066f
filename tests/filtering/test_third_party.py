"""The filter against one that we did not write: filterpy's ``KalmanFilter``."""

import itertools

import numpy as np
import pytest
import torch

from kalman_attention import kla_scan_ref
from kalman_attention.filtering import information, moment
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.information import to_information, to_moment
from kalman_attention.filtering.moment import KLAState
from tests.systems import System, assert_close, random_state, random_system

kalman = pytest.importorskip(
    "filterpy.kalman", reason="filterpy is not installed: pip install 'kalman_attention[dev]'"
)


def third_party_path(x: System, state: KLAState) -> KLAState:
    """The belief after every token, one scalar filter per row, slot and channel."""
    (B, T, D), N = x.v.shape, x.k.shape[-1]
    path = torch.empty(2, B, T, N, D, dtype=torch.float64)
    for i, n, d in itertools.product(range(B), range(N), range(D)):
        theirs = kalman.KalmanFilter(dim_x=1, dim_z=1)
        theirs.x = np.array([[state.mean[i, n, d].item()]])
        theirs.P = np.array([[state.variance[i, n, d].item()]])
        for t in range(T):
            theirs.predict(F=x.a_bar[n, d].reshape(1, 1).numpy(), Q=x.p_bar[n, d].item())
            theirs.update(
                x.v[i, t, d].item(),
                R=1 / x.lam_v[i, t, d].item(),
                H=x.k[i, t, n].reshape(1, 1).numpy(),
            )
            path[0, i, t, n, d] = theirs.x.item()
            path[1, i, t, n, d] = theirs.P.item()
    return KLAState(*path)


@pytest.fixture(scope="module", params=["noise", "no noise"])
def case(request) -> tuple[System, KLAState, KLAState]:
    x, state = random_system(B=2, T=12, seed=5), random_state()
    if request.param == "no noise":
        x = x._replace(p_bar=torch.zeros_like(x.p_bar))
    return x, state, third_party_path(x, state)


def test_information_form(case):
    x, state, theirs = case
    belief = to_information(state)
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    for t in range(x.v.shape[1]):
        belief = information.step(belief, x.a_bar, x.p_bar, phi[:, t], b[:, t])
        assert_close(to_moment(belief), KLAState(*(part[:, t] for part in theirs)), rtol=1e-11)


def test_moment_form(case):
    x, state, theirs = case
    phi, b = token_evidence(x.k, x.v, x.lam_v)
    for t in range(x.v.shape[1]):
        state = moment.step(state, x.a_bar, x.p_bar, phi[:, t], b[:, t])
        assert_close(state, KLAState(*(part[:, t] for part in theirs)), rtol=1e-11)


def test_reference_scan(case):
    x, state, theirs = case
    out = kla_scan_ref(*x, state=state, return_variance=True)
    assert_close(out.state, KLAState(*(part[:, -1] for part in theirs)), rtol=1e-11)
    q = x.q.unsqueeze(-1)
    assert_close(out.y, (q * theirs.mean).sum(2), rtol=1e-11)
    assert_close(out.y_var, (q**2 * theirs.variance).sum(2), rtol=1e-11)
