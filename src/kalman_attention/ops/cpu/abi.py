"""The C interface of the native library: the tensors of a call as two packed structs.

The C structs consist of 64-bit words only. A call packs plain integers, because filling a ctypes
structure field by field would take longer than a decode step.
"""

import struct
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.segment import AdjointMap, FilterMap
from kalman_attention.ops.contract import DTYPES, NO_ARRAY, ScanInputs, array, at, dense, rows
from kalman_attention.ops.cpu.library import ABI_VERSION, ISA, POOL, check, load

# The words of kla_scan_params and, below, of kla_scan_grads; a change of either raises the version
# of the interface.
PARAMS = struct.Struct("=47q")
KALMAN, LINEAR = 0, 1
"""Models. ``csrc/kla_scan.h`` says which field holds which letter of the linear scan."""

_GRADS = struct.Struct("=19q")

OutputGrads: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Outputs(NamedTuple):
    """Arrays that a forward pass writes; a backward pass reads the checkpoints."""

    y: Tensor | None = None
    y_var: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    checkpoints: Tensor | None = None


def run_forward(model: int, call: ScanInputs, outputs: Outputs, isa: str, pool: str) -> None:
    """Run a forward pass on dense tensors."""
    check(load().kla_scan_forward(_pack(model, call, outputs, isa, pool)))


def run_backward(
    model: int,
    call: ScanInputs,
    checkpoints: Tensor,
    inputs: OutputGrads,
    grads: tuple[Tensor | None, ...],
    isa: str,
    pool: str,
) -> None:
    """Run a backward pass.

    Args:
        model: ``KALMAN`` or ``LINEAR``.
        call: dense tensors of the forward pass.
        checkpoints: the beliefs that it saved.
        inputs: gradients with respect to y, y_var, mean, variance; None means 0.
        grads: the arrays to write, in the order of ``ScanGrads``; None for absent inputs.
        isa: instruction set.
        pool: thread pool.
    """
    outputs, kept = Outputs(checkpoints=dense(checkpoints, call.mean_0.dtype)), _read(call, inputs)
    params = _pack(model, call, outputs, isa, pool)
    check(load().kla_scan_backward(params, _pack_grads(kept, grads)))


def run_smooth(call: ScanInputs, outputs: Outputs, isa: str, pool: str) -> None:
    """Write smoothed y and y_var, given the checkpoints of a forward pass."""
    check(load().kla_scan_smooth(_pack(KALMAN, call, outputs, isa, pool)))


def run_smooth_backward(
    call: ScanInputs,
    inputs: OutputGrads,
    grads: tuple[Tensor | None, ...],
    isa: str,
    pool: str,
) -> None:
    """Run the backward pass of smoothing; arguments as for ``run_backward``."""
    params, kept = _pack(KALMAN, call, Outputs(), isa, pool), _read(call, inputs)
    check(load().kla_scan_smooth_backward(params, _pack_grads(kept, grads)))


def _read(call: ScanInputs, inputs: OutputGrads) -> OutputGrads:
    """Gradients with respect to the outputs, in the layout that kernels read.

    The caller holds on to them until the kernel has returned.
    """
    dy, dy_var = (None if x is None else rows(x) for x in inputs[:2])
    dmean, dvariance = (None if x is None else dense(x, call.mean_0.dtype) for x in inputs[2:])
    return dy, dy_var, dmean, dvariance


def _pack_grads(inputs: OutputGrads, grads: tuple[Tensor | None, ...]) -> bytes:
    dy, dy_var, dmean, dvariance = inputs
    dq, dk, dv, dlam_v, *others = grads
    written = (dv, dlam_v, dk, dq, *others)  # in the order of the struct
    return _GRADS.pack(
        *array(dy), *array(dy_var), at(dmean), at(dvariance), *(at(x) for x in written)
    )


def run_filter_map(call: ScanInputs, isa: str, pool: str) -> FilterMap:
    """Compute the summaries of all rows."""
    like = FilterMap.identity_like(KLAState(call.mean_0, call.variance_0))
    found = call.mean_0.new_empty(sum(x.numel() for x in like))
    check(load().kla_scan_filter_map(_pack(KALMAN, call, Outputs(), isa, pool), at(found)))
    return FilterMap(*_split(found, like))


def run_adjoint_map(
    call: ScanInputs,
    checkpoints: Tensor,
    dy: Tensor | None,
    dy_var: Tensor | None,
    isa: str,
    pool: str,
) -> AdjointMap:
    """Compute the summaries of all rows for the adjoint."""
    dy, dy_var = (None if x is None else rows(x) for x in (dy, dy_var))
    saved = dense(checkpoints, call.mean_0.dtype)
    packed = _GRADS.pack(*array(dy), *array(dy_var), *([0] * 11))
    like = AdjointMap.identity_like(KLAState(call.mean_0, call.variance_0))
    found = call.mean_0.new_empty(sum(x.numel() for x in like))
    params = _pack(KALMAN, call, Outputs(checkpoints=saved), isa, pool)
    check(load().kla_scan_adjoint_map(params, packed, at(found)))
    return AdjointMap(*_split(found, like))


def _split(flat: Tensor, like: tuple[Tensor, ...]) -> list[Tensor]:
    """Split a flat buffer into arrays of the shapes of ``like``."""
    parts = torch.split(flat, [x.numel() for x in like])
    return [part.view(x.shape) for part, x in zip(parts, like, strict=True)]


def _pack(model: int, call: ScanInputs, out: Outputs, isa: str, pool: str) -> bytes:
    (B, T, D), (R, N, _), mask, dt = call.v.shape, call.mean_0.shape, call.mask, call.dt
    noise = (call.p_bar, call.variance_0) if model == KALMAN else (None, None)
    return PARAMS.pack(
        *(ABI_VERSION, model, DTYPES[call.mean_0.dtype], ISA[isa], POOL[pool]),
        *(torch.get_num_threads(), B, T, N, call.a_bar.shape[0], D, R),
        *array(call.v),
        *array(call.lam_v),
        *array(call.k),
        *array(call.q),
        *(NO_ARRAY if mask is None else (mask.data_ptr(), *mask.stride(), 0)),
        *(*array(dt), 0 if dt is None else dt.shape[-1]),
        *(at(call.a_bar), at(noise[0]), at(call.mean_0), at(noise[1])),
        *(at(call.cu_seqlens), *(at(x) for x in out)),
    )
