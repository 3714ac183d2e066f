r"""The prior on the latent: an Ornstein-Uhlenbeck process, discretised exactly.

The latent follows :math:`dz = -a z\,d\tau + p\,dW`. Sampled every ``dt`` it is an AR(1) process,
:math:`z_t \mid z_{t-1} \sim N(\bar a z_{t-1}, \bar p)` (``eq:ssm_dyn``).

The diffusion ``p`` enters squared, as in the paper's equation. (The authors' released code uses
``p / (2 a)``: ``p = 0.1`` here is the noise of ``p = 0.01`` there.)
"""

import math

import torch
from torch import Tensor

from kalman_attention._typing import Dynamics

# Below this argument (1 - exp(-x)) / x is summed as a series, above it is evaluated as written:
# the derivative of the closed form cancels near zero. The terms fall like x^j / (j + 1)!, so eight
# of them reach float64 accuracy at this radius.
_SERIES_RADIUS = 0.05
_SERIES_TERMS = 8

# The same for its derivative, which cancels over a wider range and so needs more terms.
_SLOPE_RADIUS = 0.5
_SLOPE_TERMS = 13


def discretise(a: Dynamics, p: Dynamics, dt: Dynamics) -> tuple[Dynamics, Dynamics]:
    r"""Discretise the prior exactly (``eq:discretisation``).

    .. math:: \bar a = e^{-a\,dt}, \qquad \bar p = \frac{p^2}{2a}\bigl(1 - e^{-2a\,dt}\bigr)

    The limits are exact too: ``a -> 0`` is Brownian motion (a_bar = 1, p_bar = p^2 dt) and
    ``dt -> 0`` is the identity (a_bar = 1, p_bar = 0).

    Args:
        a: decay rate, at least 0, ``[N, D]``.
        p: diffusion, ``[N, D]``.
        dt: step size, at least 0, ``[N, D]``.

    Returns:
        ``a_bar`` in (0, 1] and the process-noise variance ``p_bar``, both ``[N, D]``.
    """
    a_bar = torch.exp(-a * dt)
    p_bar = p * p * dt * mean_exponential(2.0 * a * dt)
    return a_bar, p_bar


def stationary_variance(a: Dynamics, p: Dynamics) -> Dynamics:
    """Stationary variance p^2 / (2 a) of the prior: the one that predict leaves unchanged."""
    return p * p / (2.0 * a)


def mean_exponential(x: Tensor) -> Tensor:
    """Mean of exp(-u) for u in [0, x], that is (1 - exp(-x)) / x, with value 1 at x = 0."""
    near_zero = x.abs() < _SERIES_RADIUS
    # Each branch gets a harmless argument where the other is used: an overflow or a division by 0
    # in the unused branch would still make the gradient NaN.
    x_series = torch.where(near_zero, x, 0.0)
    series = torch.ones_like(x)
    for j in range(_SERIES_TERMS, 0, -1):
        series = 1.0 - x_series / (j + 1) * series
    x_closed = torch.where(near_zero, 1.0, x)
    return torch.where(near_zero, series, -torch.expm1(-x_closed) / x_closed)


def mean_exponential_slope(x: Tensor) -> Tensor:
    """Derivative of ``mean_exponential``, (exp(-x) - M(x)) / x, with value -1/2 at x = 0."""
    near_zero = x.abs() < _SLOPE_RADIUS
    x_series = torch.where(near_zero, x, 0.0)
    series = torch.zeros_like(x)
    for j in range(_SLOPE_TERMS, -1, -1):
        series = (j + 1) / math.factorial(j + 2) - x_series * series
    x_closed = torch.where(near_zero, 1.0, x)
    closed = (torch.exp(-x_closed) - mean_exponential(x_closed)) / x_closed
    return torch.where(near_zero, -series, closed)
