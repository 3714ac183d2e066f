r"""What later tokens say about an earlier latent.

Given z_t, the tokens after t do not depend on those up to t, so the belief about z_t given all of
them is the filter's belief times a likelihood,

.. math:: p(z_t \mid v_{1:T}) \;\propto\; p(z_t \mid v_{1:t})\; p(v_{t+1:T} \mid z_t), \qquad
          p(v_{t+1:T} \mid z_t) \;\propto\; e^{-\frac12 J_t z_t^2 + \eta_t z_t}.

Precision J and information eta of that likelihood are 0 after the last token and are computed
backwards in time, with one division per token. J exceeds neither a_bar^2 / p_bar nor the total
precision of the tokens, so nothing overflows, even without process noise or without decay.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention._typing import Belief, Dynamics
from kalman_attention.filtering.moment import KLAState


class Future(NamedTuple):
    """What the tokens after t say about z_t: a likelihood, not a posterior.

    Attributes:
        J: its precision, at least 0, ``[..., N, D]``; 0 carries no information.
        eta: its information, precision times the most likely value, ``[..., N, D]``.
    """

    J: Tensor
    eta: Tensor

    @classmethod
    def nothing_like(cls, state: KLAState) -> "Future":
        """No later token, with entries of the shapes and dtype of a belief."""
        return cls(J=torch.zeros_like(state.variance), eta=torch.zeros_like(state.mean))


def step_back(future: Future, a_bar: Dynamics, p_bar: Dynamics, phi: Belief, b: Belief) -> Future:
    r"""From the likelihood of the tokens after t to that of the tokens after t - 1.

    Token t is included, J' = J + phi and eta' = eta + b. Then z_t is integrated out,

    .. math:: \int N(z_t; a z_{t-1}, p)\, e^{-\frac12 J' z_t^2 + \eta' z_t} dz_t \;\propto\;
              e^{-\frac12 J z_{t-1}^2 + \eta z_{t-1}}, \qquad
              J = \frac{a^2 J'}{1 + p J'}, \quad \eta = \frac{a \eta'}{1 + p J'}.

    Args:
        future: what the tokens after t say about z_t.
        a_bar: decay from t - 1 to t.
        p_bar: process-noise variance from t - 1 to t.
        phi: precision that token t brings.
        b: information that token t brings.
    """
    J, eta = future.J + phi, future.eta + b
    scale = a_bar / (1.0 + p_bar * J)
    return Future(J=a_bar * (J * scale), eta=eta * scale)


def smooth(state: KLAState, future: Future) -> KLAState:
    """Belief about z_t given all tokens: s / (1 + J s) and (mu + s eta) / (1 + J s).

    Args:
        state: the filter's belief after token t.
        future: what the tokens after t say about z_t.
    """
    scale = 1.0 / (1.0 + future.J * state.variance)
    return KLAState(
        mean=(state.mean + state.variance * future.eta) * scale, variance=state.variance * scale
    )
