"""From belief to output: what the query asks of it (``eq:readout``, ``alg:kla``)."""

import torch

from kalman_attention._typing import Belief, Keys, Values


def read_mean(q: Keys, mean: Belief) -> Values:
    """Posterior mean of y = sum_n q_n z_n: ``[..., N]``, ``[..., N, D]`` -> ``[..., D]``."""
    return torch.einsum("...n,...nd->...d", q, mean)


def read_variance(q: Keys, variance: Belief) -> Values:
    """Posterior variance of y = sum_n q_n z_n: sum_n q_n^2 / lam_n, ``[..., D]``."""
    return torch.einsum("...n,...nd->...d", q * q, variance)
