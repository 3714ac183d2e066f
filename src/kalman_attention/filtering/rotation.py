r"""A latent that rotates, and the frame that rotates with it.

Take a block of m slots that share decay, noise and variance, and let the token rotate the block:

.. math:: z_t = \bar a U_t z_{t-1} + \text{noise}, \qquad U_t^\top U_t = 1.

The covariance of the block stays a multiple of the identity, because U (s 1) U^T = s 1, and so
does that of the noise. With the frame Q_t = U_t ... U_1 and z~_t = Q_t^T z_t the rotation
disappears,

.. math:: \tilde z_t = \bar a\, \tilde z_{t-1} + \text{noise}, \qquad
          v_t = (Q_t^\top k_t) \cdot \tilde z_t + \text{noise}, \qquad
          y_t = (Q_t^\top q_t) \cdot \tilde z_t,

which is the filter without rotation on rotated keys and queries; the length of a key does not
change. The belief about z itself has Q_t times the mean, and the same variance.

Rotations are products of Householder reflections; m of them reach every orthogonal matrix. One
reflection flips the orientation (parity), two rotate in a plane, and such rotations do not commute.
"""

import torch
from torch import Tensor


def reflections(u_h: Tensor) -> Tensor:
    """The matrices 1 - 2 u u^T / |u|^2, ``[..., m]`` -> ``[..., m, m]``; 1 where u is 0."""
    one = torch.eye(u_h.shape[-1], dtype=u_h.dtype, device=u_h.device)
    return one - _strength(u_h).unsqueeze(-1) * u_h.unsqueeze(-1) * u_h.unsqueeze(-2)


def reflect(u_h: Tensor, mean: Tensor) -> Tensor:
    """Apply the reflections of a token to a latent, in order, without forming a matrix.

    Args:
        u_h: directions, ``[..., n_h, G, m]``.
        mean: the latent to reflect, ``[..., G, m, D]``.
    """
    for u in u_h.unbind(-3):  # [..., G, m]
        along = torch.einsum("...gm,...gmd->...gd", u * _strength(u), mean)
        mean = mean - u.unsqueeze(-1) * along.unsqueeze(-2)
    return mean


def _strength(u: Tensor) -> Tensor:
    """2 / |u|^2, ``[..., 1]``; 0, with a gradient of 0, where u is 0."""
    # The inner where() keeps the division finite, so that no NaN gradient reaches u = 0.
    length = u.square().sum(-1, keepdim=True)
    some = length > 0
    return torch.where(some, 2.0 / torch.where(some, length, 1.0), 0.0)


def rotation(u_h: Tensor) -> Tensor:
    """The rotation of a token: its reflections, applied in order.

    Args:
        u_h: directions, of any length, ``[..., n_h, m]``.

    Returns:
        U = H_(n_h) ... H_1, orthogonal, ``[..., m, m]``; the identity without reflections.
    """
    U = torch.eye(u_h.shape[-1], dtype=u_h.dtype, device=u_h.device)
    U = U.expand(*u_h.shape[:-2], *U.shape)
    for H in reflections(u_h).unbind(-3):
        U = H @ U
    return U


def frames(U: Tensor) -> Tensor:
    """The frame after every token, Q_t = U_t ... U_1, ``[B, T, ..., m, m]``."""
    Q, found = torch.eye(U.shape[-1], dtype=U.dtype, device=U.device), []
    for U_t in U.unbind(1):
        Q = U_t @ Q
        found.append(Q)
    return torch.stack(found, 1) if found else U


def into_frame(Q: Tensor, k: Tensor) -> Tensor:
    """A key or query of a block in the rotating frame, Q^T k: ``[..., m]``."""
    return (Q.transpose(-1, -2) @ k.unsqueeze(-1)).squeeze(-1)
