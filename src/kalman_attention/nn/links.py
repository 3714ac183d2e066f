"""Links: maps from unconstrained to positive numbers, and their inverses for initialisation."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kalman_attention.ops.cpu import can_fuse, softplus_backward, softplus_forward, torch_gradients

PrecisionLink = Literal["inverse_softplus", "softplus", "exp"]


def value_precision(x: Tensor, link: PrecisionLink, floor: float) -> Tensor:
    """Precision lam_v > 0 of a value, from an unconstrained projection; at least float32.

    ``inverse_softplus`` floors the *variance*: lam_v = 1 / (softplus(x) + floor), so the precision
    lies in (0, 1 / floor). ``softplus`` floors the precision: lam_v = softplus(x) + floor. ``exp``
    has no floor. All three are differentiable everywhere.
    """
    if link == "exp":
        return torch.exp(x if x.dtype == torch.float64 else x.float())
    return softplus(x, floor=floor, inverse=link == "inverse_softplus")


def softplus(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    floor: float = 0.0,
    scale: float = 1.0,
    inverse: bool = False,
) -> Tensor:
    """Compute scale (softplus(x + bias) + floor), or scale divided by that bracket.

    Args:
        x: ``[..., D]``.
        bias: ``[D]``, or None for 0.
        floor: added to softplus.
        scale: factor, or numerator.
        inverse: divide by the bracket.

    Returns:
        ``[..., D]``, at least float32.
    """
    # Without a floor the reciprocal grows beyond the numbers that native code distinguishes from 0.
    if can_fuse(x, bias) and not (inverse and floor == 0.0):
        y: Tensor = _Softplus.apply(x, bias, floor, scale, inverse)  # type: ignore[no-untyped-call]
        return y
    return _plain_softplus(x, bias, floor, scale, inverse)


def _plain_softplus(
    x: Tensor, bias: Tensor | None, floor: float, scale: float, inverse: bool
) -> Tensor:
    x = x if x.dtype == torch.float64 else x.float()
    y = nn.functional.softplus(x if bias is None else x + bias.to(x.dtype)) + floor
    return scale / y if inverse else scale * y


class _Softplus(torch.autograd.Function):
    """The link in one native pass over the tokens, and its gradient in another."""

    @staticmethod
    def forward(
        x: Tensor, bias: Tensor | None, floor: float, scale: float, inverse: bool
    ) -> Tensor:
        return softplus_forward(x, bias, floor=floor, scale=scale, inverse=inverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, bias, *ctx.numbers = inputs
        ctx.save_for_backward(x, bias, output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, bias, y = ctx.saved_tensors
        floor, scale, inverse = ctx.numbers
        if torch.is_grad_enabled():

            def plain(x: Tensor, bias: Tensor | None) -> Tensor:
                return _plain_softplus(x, bias, floor, scale, inverse)

            return *torch_gradients(plain, dy, x, bias), None, None, None
        options = {"floor": floor, "scale": scale, "inverse": inverse}
        return *softplus_backward(dy, x, bias, y, **options), None, None, None


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
