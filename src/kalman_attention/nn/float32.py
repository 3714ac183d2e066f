"""Parameters that stay float32 when the model around them is converted to a shorter dtype."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

Kept = TypeVar("Kept", bound="KeepsFloat32")
Found = TypeVar("Found")
P = ParamSpec("P")


class KeepsFloat32(nn.Module):
    """A module whose own parameters are never shorter than float32: gates, decays, rates.

    ``model.bfloat16()`` does not change them, ``model.double()`` does.
    """

    def _apply(self: Kept, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Kept:
        def at_least_float32(x: Tensor) -> Tensor:
            moved = fn(x)
            if moved.is_floating_point() and moved.dtype.itemsize < 4:
                return x.to(device=moved.device, dtype=torch.float32)
            return moved

        super()._apply(at_least_float32, recurse)  # type: ignore[no-untyped-call]
        return self


class Float32Linear(KeepsFloat32, nn.Linear):
    """A linear map for gates, computed in its own dtype for any dtype of the input.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether to add one.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias, dtype=parameter_dtype())

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]``, at least float32."""
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))


def parameter_dtype() -> torch.dtype:
    """Dtype of new parameters that are never shorter than float32."""
    # The default dtype may be shorter, as when transformers builds a model.
    return at_least_float32(torch.get_default_dtype())


def empty_parameter(*shape: int, learned: bool = True) -> nn.Parameter:
    """A parameter without values, at least float32.

    Args:
        *shape: its shape.
        learned: whether it needs a gradient.
    """
    return nn.Parameter(torch.empty(shape, dtype=parameter_dtype()), learned)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Dtype for arithmetic and states: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert all tensors to the dtype for arithmetic that the first one determines."""
    dtype = at_least_float32(tensors[0].dtype)
    return tuple(x.to(dtype) for x in tensors)


def without_autocast(rule: Callable[P, Found]) -> Callable[P, Found]:
    """Decorate a function of tensors so that ``torch.autocast`` does not affect it."""

    @wraps(rule)
    def run(*inputs: P.args, **options: P.kwargs) -> Found:
        assert isinstance(inputs[0], Tensor)
        with torch.autocast(inputs[0].device.type, enabled=False):
            return rule(*inputs, **options)

    return run
