r"""What a token says about the latent: :math:`v \mid z \sim N(kz, 1/\Lambda^v)`, ``eq:ssm_obs``."""

from kalman_attention._typing import Belief, Keys, Precisions, Values


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
