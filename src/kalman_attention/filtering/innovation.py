r"""How a token compares with what the filter expected of it.

Before token t is observed the belief about z_t is N(m, P), so the predictive distribution of its
value is

.. math:: v_t \mid v_{1:t-1} \sim N(k m,\; S), \qquad S = k^2 P + 1 / \Lambda^v.

With one slot per channel this is the textbook likelihood of a series, token by token; maximising
its sum by gradient descent fits decay, noise and precisions. With several slots each slot is a
separate model of the same value, and the results are statistics per slot.

A Kalman variance does not depend on the values, because the noise levels are taken as known. If
every variance of the model is only known up to a common factor c with an inverse-gamma prior, the
means stay as they are, the posterior of c is inverse-gamma again and the predictive distribution is
a Student t whose width follows the innovations:

.. math::
    c \mid v_{1:t} \sim IG(\tfrac{n_t}{2}, \tfrac{n_t c_t}{2}), \quad
    n_t = n_0 + t, \quad n_t c_t = n_0 + \sum_{i \le t} e_i^2 / S_i, \qquad
    v_{t+1} \mid v_{1:t} \sim t_{n_t}(k m,\; c_t S).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention._typing import Belief, Keys, Precisions, Values
from kalman_attention.filtering.moment import KLAState, retention


def normalised_innovation(prior: KLAState, k: Keys, v: Values, lam_v: Precisions) -> Belief:
    """Squared innovation e^2 / S with e = v - k m, ``[..., N, D]``: 1 on average if the model fits.

    Args:
        prior: predicted belief, before the token is observed, ``[..., N, D]``.
        k: observation operator, ``[..., N]``.
        v: value, ``[..., D]``.
        lam_v: its precision, ``[..., D]``.
    """
    k_column, lam = k.unsqueeze(-1), lam_v.unsqueeze(-2)
    seen = torch.where(lam_v > 0, v, 0.0).unsqueeze(-2)
    # 1 / S = lam_v r with r = 1 / (1 + k^2 lam_v P): a token without evidence, whose S is
    # infinite, gives exactly 0, whatever v contains.
    r = retention(prior.variance, k_column * k_column * lam)
    return lam * r * (seen - k_column * prior.mean).square()


def log_likelihood(prior: KLAState, k: Keys, v: Values, lam_v: Precisions) -> Belief:
    r"""Log density of the value under the predictive distribution, in nats, ``[..., N, D]``.

    .. math:: \log N(v; k m, S) = \tfrac12 \log\frac{\Lambda^v r}{2 \pi} - \tfrac12 \frac{e^2}{S}

    A token without evidence contributes 0. Arguments as for ``normalised_innovation``.
    """
    k_column, lam = k.unsqueeze(-1), lam_v.unsqueeze(-2)
    observed = lam > 0
    log_lam = torch.where(observed, lam, 1.0).log()  # a log of 0 would give NaN gradients
    spread = torch.log1p(k_column * k_column * lam * prior.variance)
    density = 0.5 * (log_lam - math.log(2.0 * math.pi) - spread)
    return torch.where(observed, density, 0.0) - 0.5 * normalised_innovation(prior, k, v, lam_v)


class NoiseScale(NamedTuple):
    """Posterior of the common factor of all variances after each token.

    Attributes:
        factor: c_t, the estimate to multiply variances by, ``[B, T, D]``.
        freedom: n_t, degrees of freedom of the Student t that follows, ``[B, T, D]``.
    """

    factor: Tensor
    freedom: Tensor


def noise_scale(normalised: Tensor, lam_v: Precisions, *, freedom: float = 1.0) -> NoiseScale:
    """Estimate the common factor of all variances from the innovations up to each token.

    Exact for one slot. With several, the slots are models of the same value: their innovations are
    averaged and count as one observation.

    Args:
        normalised: squared normalised innovations, as ``kla_innovations`` returns them,
            ``[B, T, N, D]``.
        lam_v: precision of each value, ``[B, T, D]``; a value with precision 0 counts as missing.
        freedom: n_0, the number of observations that the initial factor of 1 is worth.
    """
    if not freedom > 0:
        raise ValueError(f"freedom must be positive, got {freedom}.")
    observed = (lam_v > 0).to(normalised.dtype)
    n = freedom + observed.cumsum(1)
    return NoiseScale((freedom + normalised.mean(-2).cumsum(1)) / n, n)
