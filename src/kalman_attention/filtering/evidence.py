r"""What a token says about the latent: :math:`v \mid z \sim N(kz, 1/\Lambda^v)`, ``eq:ssm_obs``."""

import torch

from kalman_attention._typing import Belief, Keys, Precisions, Values


def without_gaps(v: Values, lam_v: Precisions) -> Values:
    """Replace missing values by 0: those that are NaN or infinite where the precision is 0."""
    # 0 times NaN is NaN, so a missing value would reach the belief. A finite value stays even
    # where its precision is 0: the gradient with respect to that precision depends on it.
    return torch.where((lam_v != 0.0) | v.isfinite(), v, 0.0)


def token_evidence(k: Keys, v: Values, lam_v: Precisions) -> tuple[Belief, Belief]:
    r"""Precision and information that a token adds to the belief.

    .. math:: \phi = k^2 \Lambda^v \quad\text{(Th:Mobius)}, \qquad
              b = k \Lambda^v v \quad\text{(thm:eta-affine)}

    A zero key or a zero precision is no evidence: both results are 0 and the update is the
    identity.

    Args:
        k: observation operator, ``[..., N]``.
        v: value, ``[..., D]``.
        lam_v: precision of the value, ``[..., D]``.

    Returns:
        ``phi`` and ``b``, the outer products over slots and channels, ``[..., N, D]``.
    """
    k_column = k.unsqueeze(-1)
    phi = k_column * k_column * lam_v.unsqueeze(-2)
    b = k_column * (lam_v * v).unsqueeze(-2)
    return phi, b
