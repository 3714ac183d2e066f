r"""How a token compares with what the filter expected of it.

Before token t is observed the belief about z_t is N(m, P), so the predictive distribution of its
value is

.. math:: v_t \mid v_{1:t-1} \sim N(k m,\; S), \qquad S = k^2 P + 1 / \Lambda^v.

With one slot per channel this is the textbook likelihood of a series, token by token; maximising
its sum by gradient descent fits decay, noise and precisions. With several slots each slot is a
separate model of the same value, and the results are statistics per slot.
"""

import math

import torch

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
