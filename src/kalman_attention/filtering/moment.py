r"""The same filter in coordinates that stay bounded: mean and variance.

This is what every engine computes. It takes one division per element, and no quantity can overflow:
the variance never exceeds max(initial variance, p_bar / (1 - a_bar^2)), and with p_bar = 0 it tends
to 0, which is the correct limit. Algebraically it is ``information`` with s = 1 / lam.

**Predict.** The belief is N(mu, s) and z_t = a_bar z_{t-1} + noise of variance p_bar, so

.. math:: z_t \sim N(\bar a \mu,\; P), \qquad P = \bar a^2 s + \bar p.

**Update.** Multiply that density by the likelihood of the token, exp(-phi z^2 / 2 + b z). The
exponents add; completing the square gives the posterior N(mu', s'),

.. math:: \frac{1}{s'} = \frac{1}{P} + \phi, \quad
          \frac{\mu'}{s'} = \frac{\bar a \mu}{P} + b \qquad\Longrightarrow\qquad
          s' = r P, \quad \mu' = r \bar a \mu + s' b, \quad r = \frac{1}{1 + \phi P}.
"""

from typing import NamedTuple

import torch

from kalman_attention._typing import Belief, Dynamics


class KLAState(NamedTuple):
    """The posterior of the latent: independent Gaussians, one per slot and channel.

    Attributes:
        mean: posterior mean mu, ``[..., N, D]``.
        variance: posterior variance 1 / lam, ``[..., N, D]``; 0 means that the latent is known
            exactly.
    """

    mean: Belief
    variance: Belief

    @property
    def lam(self) -> Belief:
        """The paper's precision, 1 / variance."""
        return 1.0 / self.variance

    @property
    def eta(self) -> Belief:
        """The paper's information mean, mean / variance."""
        return self.mean / self.variance

    @classmethod
    def unit_prior(
        cls,
        rows: int,
        d_state: int,
        d_inner: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "KLAState":
        """The default prior: mean 0, variance 1, for ``rows`` independent sequences."""
        shape = (rows, d_state, d_inner)
        return cls(
            mean=torch.zeros(shape, dtype=dtype, device=device),
            variance=torch.ones(shape, dtype=dtype, device=device),
        )

    def detach(self) -> "KLAState":
        """The same state, detached from the autograd graph (for truncated backpropagation)."""
        return KLAState(self.mean.detach(), self.variance.detach())


def predict(state: KLAState, a_bar: Dynamics, p_bar: Dynamics) -> KLAState:
    """Belief about z_t before token t is observed: mean a_bar mu, P = a_bar^2 s + p_bar."""
    # a (a s), not a^2 s: the rounding error of a precomputed a^2 is the same in every step, adds up
    # over the memory of the filter and costs a digit at 8,192 tokens.
    return KLAState(mean=a_bar * state.mean, variance=a_bar * (a_bar * state.variance) + p_bar)


def update(prior: KLAState, phi: Belief, b: Belief) -> KLAState:
    """Condition on a token: s = P r and mu = r mu_prior + s b, with r = 1 / (1 + phi P)."""
    r = retention(prior.variance, phi)
    variance = prior.variance * r
    # A sum of prediction and evidence, never the prediction plus a correction s (b - phi mu): where
    # strong evidence meets a large mean, only the rounding error of the mean would remain.
    return KLAState(mean=r * prior.mean + variance * b, variance=variance)


def retention(prior_variance: Belief, phi: Belief) -> Belief:
    """Share r = lam_prior / lam of the predicted mean that the update keeps, in (0, 1]."""
    return 1.0 / (1.0 + phi * prior_variance)


def innovation(prior_mean: Belief, phi: Belief, b: Belief) -> Belief:
    """What a token says beyond the prediction: e = b - phi mu_prior."""
    return b - phi * prior_mean


def step(state: KLAState, a_bar: Dynamics, p_bar: Dynamics, phi: Belief, b: Belief) -> KLAState:
    """One token: predict, then update."""
    return update(predict(state, a_bar, p_bar), phi, b)
