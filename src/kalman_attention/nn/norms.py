"""Normalisation, computed in float32 even for shorter dtypes."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kalman_attention.nn.float32 import at_least_float32
from kalman_attention.ops.cpu import can_fuse, norm_backward, norm_forward, torch_gradients


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last axis, then scale by a learned gain.

    Args:
        width: size of the last axis.
        eps: added to the mean square.
    """

    parameter_group: ClassVar[str] = "vector"

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        """Set the gain to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., width]``; the dtype of x is kept."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Root-mean-square norm over the last axis, in the dtype of ``x``."""
    gain = None if weight is None else weight.to(at_least_float32(x.dtype))
    if can_fuse(x, gain):
        y: Tensor = _FusedNorm.apply(x, gain, eps)  # type: ignore[no-untyped-call]
        return y
    return _plain_norm(x, gain, eps)


def _plain_norm(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    if x.dtype in (torch.float32, torch.float64):
        return nn.functional.rms_norm(x, x.shape[-1:], gain, eps)
    # In float32: squares would overflow in half, and their mean would lose digits in bfloat16.
    return nn.functional.rms_norm(x.float(), x.shape[-1:], gain, eps).to(x.dtype)


class _FusedNorm(torch.autograd.Function):
    """The norm in one native pass, and its gradient in another."""

    @staticmethod
    def forward(x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        return norm_forward(x, gain, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, gain, ctx.eps = inputs
        ctx.save_for_backward(x, gain)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, gain = ctx.saved_tensors
        if torch.is_grad_enabled():

            def plain(x: Tensor, gain: Tensor | None) -> Tensor:
                return _plain_norm(x, gain, ctx.eps)

            return *torch_gradients(plain, dy, x, gain), None
        return *norm_backward(dy, x, gain, ctx.eps), None


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale the last axis to length 1, at least in float32; a zero vector stays zero."""
    # eps enters under the root, so that the gradient is finite even at zero.
    x = x if x.dtype == torch.float64 else x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps * eps)
