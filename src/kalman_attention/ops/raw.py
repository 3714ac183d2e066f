"""Tensors as addresses, strides and type codes, for engines behind a C interface."""

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""Type codes of ``csrc/kla_scan.h`` and ``csrc/cuda/params.h``."""

NO_ARRAY = (0, 0, 0, 0)
"""An absent ``[B, T, *]`` array: address, two strides, type."""


def rows(x: Tensor) -> Tensor:
    """The same values with a contiguous last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same values, contiguous and in ``dtype``."""
    # Asking first is ten times cheaper than a Tensor.to that has nothing to do.
    return x.contiguous() if x.dtype is dtype else x.to(dtype).contiguous()


def at(x: Tensor | None) -> int:
    """Address of x; 0 for None."""
    return 0 if x is None else x.data_ptr()


def array(x: Tensor | None) -> tuple[int, int, int, int]:
    """A ``[B, T, *]`` array as its address, two strides and type."""
    if x is None:
        return NO_ARRAY
    return (x.data_ptr(), x.stride(0), x.stride(1), DTYPES[x.dtype])
