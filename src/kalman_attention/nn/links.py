"""Links: maps from unconstrained to positive numbers, and their inverses for initialisation."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

PrecisionLink = Literal["inverse_softplus", "softplus", "exp"]


def value_precision(x: Tensor, link: PrecisionLink, floor: float) -> Tensor:
    """Precision lam_v > 0 of a value, from an unconstrained projection; at least float32.

    ``inverse_softplus`` floors the *variance*: lam_v = 1 / (softplus(x) + floor), so the precision
    lies in (0, 1 / floor). ``softplus`` floors the precision: lam_v = softplus(x) + floor. ``exp``
    has no floor. All three are differentiable everywhere.
    """
    x = x if x.dtype == torch.float64 else x.float()
    if link == "inverse_softplus":
        return nn.functional.softplus(x).add_(floor).reciprocal_()
    if link == "softplus":
        return nn.functional.softplus(x) + floor
    return torch.exp(x)


def precision_range(link: PrecisionLink, floor: float) -> tuple[float, float]:
    """Open interval of the values of ``value_precision``."""
    if link == "inverse_softplus":
        return 0.0, 1.0 / floor if floor else math.inf
    return (floor, math.inf) if link == "softplus" else (0.0, math.inf)


def inverse_precision(precision: float, link: PrecisionLink, floor: float) -> float:
    """The x with ``value_precision(x, link, floor)`` = precision."""
    if link == "exp":
        return math.log(precision)
    y = 1.0 / precision - floor if link == "inverse_softplus" else precision - floor
    return float(inverse_softplus(torch.tensor(y, dtype=torch.float64)))


def inverse_softplus(y: Tensor) -> Tensor:
    """The x with softplus(x) = y > 0, accurate also for small y."""
    return y + torch.log(-torch.expm1(-y))


def log_uniform(shape: tuple[int, ...], low: float, high: float, dtype: torch.dtype) -> Tensor:
    """Samples whose logarithm is uniform between those of ``low`` and ``high``."""
    span = math.log(high) - math.log(low)
    return torch.exp(math.log(low) + span * torch.rand(shape, dtype=dtype))
