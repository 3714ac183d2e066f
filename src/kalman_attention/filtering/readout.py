"""From belief to output: the projection that the query asks for (``eq:readout``, ``alg:kla``)."""

import torch
from torch import Tensor

from kalman_attention._typing import Belief, Keys, Values


def read_mean(q: Keys, mean: Belief) -> Values:
    """Posterior mean of y = sum_n q_n z_n: ``[..., N]``, ``[..., N, D]`` -> ``[..., D]``."""
    return torch.einsum("...n,...nd->...d", q, mean)


def read_variance(q: Keys, variance: Belief) -> Values:
    """Posterior variance of y = sum_n q_n z_n: sum_n q_n^2 / lam_n, ``[..., D]``."""
    return torch.einsum("...n,...nd->...d", q * q, variance)


def sample_readout(y: Values, y_var: Values, noise: Tensor) -> Values:
    """Draws from the posterior of the read-out: y + sqrt(y_var) noise.

    Differentiable with respect to mean and variance.

    Args:
        y: posterior means, ``[..., D]``.
        y_var: posterior variances, ``[..., D]``.
        noise: standard normal samples; leading axes broadcast, ``[S, ..., D]``.
    """
    # Where the variance is exactly 0 every draw equals the mean, and the gradient with respect to
    # the variance is set to 0: the slope of the square root is infinite there.
    unsure = y_var > 0
    spread = torch.where(unsure, torch.where(unsure, y_var, 1.0).sqrt(), 0.0)
    return (y + spread * noise).to(y.dtype)
