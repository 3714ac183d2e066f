r"""Blocks of slots that share decay, noise and precision.

The N slots of a channel form G blocks of m. A token observes a block as a whole: the point
k v / |k|^2 with precision |k|^2 lam_v in every direction. The covariance of a block therefore stays
a multiple of the identity, and one variance serves its m slots. For block g,

.. math:: \phi_g = \Lambda^v \sum_{n \in g} k_n^2, \qquad b_n = k_n \Lambda^v v, \qquad
          y^\Sigma = \sum_g s_g \sum_{n \in g} q_n^2.

Here means are ``[..., G, m, D]`` and variances ``[..., G, 1, D]``, so the functions of ``moment``
apply unchanged by broadcasting. G = N, blocks of one slot, is the paper's filter.
"""

import torch
from torch import Tensor

from kalman_attention._typing import Belief, Precisions, Values
from kalman_attention.filtering.moment import KLAState


def block_evidence(k: Tensor, v: Values, lam_v: Precisions) -> tuple[Belief, Belief]:
    """Precision and information that a token adds to the blocks.

    Args:
        k: observation operator, ``[..., G, m]``.
        v: value, ``[..., D]``.
        lam_v: precision of the value, ``[..., D]``.

    Returns:
        ``phi``, ``[..., G, 1, D]``, and ``b``, ``[..., G, m, D]``.
    """
    phi = (k * k).sum(-1)[..., None, None] * lam_v[..., None, None, :]  # [..., G, 1, D]
    return phi, k.unsqueeze(-1) * (lam_v * v)[..., None, None, :]


def read_blocks(q: Tensor, state: KLAState) -> tuple[Values, Values]:
    """Posterior mean and variance of y = sum_n q_n z_n, with q ``[..., G, m]``."""
    y = torch.einsum("...gm,...gmd->...d", q, state.mean)
    return y, torch.einsum("...g,...gd->...d", (q * q).sum(-1), state.variance.squeeze(-2))


def to_blocks(state: KLAState) -> KLAState:
    """Belief ``[..., N, D]``, ``[..., G, D]`` as ``[..., G, m, D]``, ``[..., G, 1, D]``."""
    G = state.variance.shape[-2]
    m = state.mean.shape[-2] // G
    return KLAState(torch.unflatten(state.mean, -2, (G, m)), state.variance.unsqueeze(-2))


def from_blocks(state: KLAState) -> KLAState:
    """The inverse of ``to_blocks``."""
    return KLAState(state.mean.flatten(-3, -2), state.variance.squeeze(-2))
