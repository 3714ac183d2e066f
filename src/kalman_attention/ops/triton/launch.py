"""Launching kernels: compiler options, and the arguments that all kernels share."""

import functools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from kalman_attention.ops.contract import ScanInputs

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# A program is a single warp, so it may use all 255 registers; without an explicit limit ptxas aims
# at 168 for some kernels and spills. Fusion is explicit because its default depends on the release.
OPTIONS = {"num_warps": 1, "maxnreg": 255, "enable_fp_fusion": True}
"""Compiler options of every launch."""


class Tokens(NamedTuple):
    """Arguments of every kernel that processes time, in the order of its parameters.

    Attributes:
        arrays: q, k, v, lam_v, dt, mask, cu_seqlens.
        strides: batch and time strides of q, k, v, lam_v, dt, mask; dt also has a channel stride.
        dynamics: a_bar and p_bar, contiguous, in the arithmetic dtype; with dt, -log a_bar and
            p_bar.
        state_0: initial mean and variance, contiguous, in the arithmetic dtype.
    """

    arrays: tuple[Tensor | None, ...]
    strides: tuple[int, ...]
    dynamics: tuple[Tensor, Tensor]
    state_0: tuple[Tensor, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the arithmetic."""
        return self.state_0[0].dtype


def prepare(inputs: ScanInputs) -> Tokens:
    """Bring the arguments of a call into the form of the kernels; copies only where necessary."""
    call = inputs.dense(inputs.arithmetic_dtype)
    mask = None if call.mask is None else call.mask.view(torch.uint8)
    strides = [stride for x in call[:4] for stride in x.stride()[:2]]
    strides += (0, 0, 0) if call.dt is None else (*call.dt.stride()[:2], width_of(call.dt))
    strides += (0, 0) if mask is None else mask.stride()
    return Tokens(
        arrays=(*call[:4], call.dt, mask, call.cu_seqlens),
        strides=tuple(strides),
        dynamics=(kernel_decay(inputs, call.a_bar), call.p_bar),
        state_0=(call.mean_0, call.variance_0),
    )


def kernel_decay(inputs: ScanInputs, a_bar: Tensor) -> Tensor:
    """The decay as kernels read it: a_bar, or the rate -log a_bar if there are gaps."""
    # Always in float64: it happens once per call, and decays near 1 need the digits.
    return a_bar if inputs.dt is None else inputs.a_bar.double().log().neg().to(a_bar.dtype)


def width_of(dt: Tensor) -> int:
    """Stride between the channels of dt; 0 if all channels share one gap."""
    return 0 if dt.shape[-1] == 1 else dt.stride(-1)


def on_device(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Launch the kernels of ``function(inputs, ...)`` on the device of its tensors."""

    @functools.wraps(function)
    def launch(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        inputs = cast(ScanInputs, args[0])
        with torch.cuda.device_of(inputs.v):
            return function(*args, **options)

    return launch
