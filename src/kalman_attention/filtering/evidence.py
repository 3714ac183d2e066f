r"""What a token says about the latent: :math:`v \mid z \sim N(kz, 1/\Lambda^v)`, ``eq:ssm_obs``."""

import torch

from kalman_attention._typing import Belief, Keys, Precisions, Values


def without_gaps(v: Values, lam_v: Precisions) -> Values:
    """The values, with 0 for what is missing: NaN or infinite where the precision is 0.

    Such a value brings nothing, and 0 lam_v v would be NaN. A finite one is left as it is, so that
    the gradient of its precision is right.
    """
    return torch.where((lam_v != 0.0) | v.isfinite(), v, 0.0)


def token_evidence(k: Keys, v: Values, lam_v: Precisions) -> tuple[Belief, Belief]:
    r"""Precision and information that a token adds to the belief.

    .. math:: \phi = k^2 \Lambda^v \quad\text{(Th:Mobius)}, \qquad
              b = k \Lambda^v v \quad\text{(thm:eta-affine)}

    A zero key or a zero precision is no evidence: both results are 0 and the update does nothing.

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
