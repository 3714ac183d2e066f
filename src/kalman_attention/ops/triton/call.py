"""How a call reaches the kernels: tensors with a contiguous last axis, and their strides."""

import functools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from kalman_attention.ops.contract import ScanInputs

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

OPTIONS = {"num_warps": 1, "maxnreg": 255, "enable_fp_fusion": True}
"""Compiler options of every launch.

A program is one warp, so registers may be used up: without the limit said aloud ptxas aims at 168
for some kernels and spills. Fusion is named because its default depends on the release.
"""


class Tokens(NamedTuple):
    """What every kernel that walks time is given, in the order of its parameters.

    Attributes:
        arrays: q, k, v, lam_v, mask, cu_seqlens.
        strides: batch and time strides of q, k, v, lam_v, mask.
        dynamics: a_bar and p_bar, dense, in the arithmetic dtype.
        state_0: first mean and variance, likewise.
    """

    arrays: tuple[Tensor | None, ...]
    strides: tuple[int, ...]
    dynamics: tuple[Tensor, Tensor]
    state_0: tuple[Tensor, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic."""
        return self.state_0[0].dtype


def prepare(inputs: ScanInputs) -> Tokens:
    """Bring the arguments of a call into the form of the kernels; copies only what it must."""
    dtype = inputs.arithmetic_dtype
    tokens = [rows(x) for x in inputs[:4]]
    mask, cu_seqlens = inputs.mask, inputs.cu_seqlens
    if mask is not None:
        mask = mask.view(torch.uint8)
    if cu_seqlens is not None:
        cu_seqlens = dense(cu_seqlens, torch.int64)
    strides = [stride for x in tokens for stride in x.stride()[:2]]
    strides += (0, 0) if mask is None else mask.stride()
    return Tokens(
        arrays=(*tokens, mask, cu_seqlens),
        strides=tuple(strides),
        dynamics=(dense(inputs.a_bar, dtype), dense(inputs.p_bar, dtype)),
        state_0=(dense(inputs.mean_0, dtype), dense(inputs.variance_0, dtype)),
    )


def new_checkpoints(inputs: ScanInputs, dtype: torch.dtype) -> Tensor:
    """Room for the belief before each chunk; slots that documents leave out are 0."""
    new = torch.empty if inputs.cu_seqlens is None else torch.zeros
    shape = (2, inputs.chunks, *inputs.a_bar.shape)
    return new(shape, dtype=dtype, device=inputs.v.device)


def on_device(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Launch the kernels of ``function(inputs, ...)`` on the device of its tensors."""

    @functools.wraps(function)
    def launch(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        inputs = cast(ScanInputs, args[0])
        with torch.cuda.device_of(inputs.v):
            return function(*args, **options)

    return launch


def rows(x: Tensor) -> Tensor:
    """The same values with a contiguous last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same values, contiguous and in ``dtype``."""
    return x.to(dtype).contiguous()
