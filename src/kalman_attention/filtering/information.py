r"""The filter in the paper's coordinates: precision and information mean.

The belief is :math:`N(\mu, \lambda^{-1})` with :math:`\eta = \lambda\mu`. New evidence is then
*added*; predict multiplies both by the same factor rho (Step 1 of the proof of ``Th:Mobius``).

These coordinates are the ones of the theorems, and are not used for computation: with p_bar = 0 and
a_bar < 1 both lam and eta grow like a_bar^(-2t) and overflow. Engines use ``moment``.
"""

from typing import NamedTuple

from kalman_attention._typing import Belief, Dynamics
from kalman_attention.filtering.moment import KLAState


class Information(NamedTuple):
    """A Gaussian belief as precision ``lam`` and information mean ``eta``, ``[..., N, D]``."""

    lam: Belief
    eta: Belief


def to_information(state: KLAState) -> Information:
    """Information form of a belief: lam = 1 / variance, eta = lam * mean."""
    return Information(lam=state.lam, eta=state.eta)


def to_moment(belief: Information) -> KLAState:
    """Moment form of a belief: mean = eta / lam, variance = 1 / lam."""
    return KLAState(mean=belief.eta / belief.lam, variance=1.0 / belief.lam)


def rho(lam_prev: Belief, a_bar: Dynamics, p_bar: Dynamics) -> Belief:
    r"""Ratio of predicted to previous precision, :math:`1/(\bar a^2 + \bar p \lambda_{t-1})`.

    The one factor through which process noise acts (``eq:lambda_gate_view``).
    """
    return 1.0 / (a_bar * a_bar + p_bar * lam_prev)


def forget_gate(lam_prev: Belief, a_bar: Dynamics, p_bar: Dynamics) -> Belief:
    """Factor f = rho a_bar by which the information mean is multiplied (``thm:eta-affine``)."""
    return rho(lam_prev, a_bar, p_bar) * a_bar


def predict(belief: Information, a_bar: Dynamics, p_bar: Dynamics) -> Information:
    """Belief about z_t before token t is seen: lam_prior = rho lam, eta_prior = f eta."""
    return Information(
        lam=rho(belief.lam, a_bar, p_bar) * belief.lam,
        eta=forget_gate(belief.lam, a_bar, p_bar) * belief.eta,
    )


def update(prior: Information, phi: Belief, b: Belief) -> Information:
    """Add the evidence of a token: lam = lam_prior + phi, eta = eta_prior + b."""
    return Information(lam=prior.lam + phi, eta=prior.eta + b)


def step(
    belief: Information, a_bar: Dynamics, p_bar: Dynamics, phi: Belief, b: Belief
) -> Information:
    """One token: predict, then update (``eq:kla-prec-mat`` and ``eq:kla-mean-mat``)."""
    return update(predict(belief, a_bar, p_bar), phi, b)
