"""How a call reaches the native library: tensors in, two packed structs out.

The C structs consist of 64-bit words only, so a call packs plain integers instead of filling a
ctypes structure field by field, which would cost more than a decode step.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention.ops.contract import CHUNK
from kalman_attention.ops.cpu.library import ABI_VERSION, ISA, POOL, check, load
from kalman_attention.ops.raw import DTYPES, NO_ARRAY, array, at, dense, rows

PARAMS = struct.Struct("=41q")
KALMAN, LINEAR = 0, 1

_GRADS = struct.Struct("=18q")


class Call(NamedTuple):
    """The inputs of a scan, in the letters of the Kalman scan (see ``csrc/kla_scan.h``)."""

    model: int
    q: Tensor
    k: Tensor
    v: Tensor
    lam_v: Tensor
    a_bar: Tensor
    p_bar: Tensor | None
    mean_0: Tensor
    variance_0: Tensor | None
    mask: Tensor | None
    cu_seqlens: Tensor | None


class Outputs(NamedTuple):
    """Where a forward pass writes, and where a backward pass finds the checkpoints."""

    y: Tensor | None = None
    y_var: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    checkpoints: Tensor | None = None


def prepare(call: Call, dtype: torch.dtype) -> Call:
    """Rows with a contiguous last axis; dynamics and states dense and in the arithmetic dtype."""
    cu_seqlens = call.cu_seqlens
    if cu_seqlens is not None:
        cu_seqlens = dense(cu_seqlens, torch.int64)
    return Call(
        call.model,
        rows(call.q),
        rows(call.k),
        rows(call.v),
        rows(call.lam_v),
        dense(call.a_bar, dtype),
        None if call.p_bar is None else dense(call.p_bar, dtype),
        dense(call.mean_0, dtype),
        None if call.variance_0 is None else dense(call.variance_0, dtype),
        call.mask,
        cu_seqlens,
    )


def new_checkpoints(call: Call, fields: int) -> Tensor:
    """Room for ``fields`` saved states per chunk; slots that documents leave out are 0."""
    (B, T, _), (R, N, D) = call.v.shape, call.mean_0.shape
    if call.cu_seqlens is None:
        return torch.empty(fields, B * -(-T // CHUNK), N, D, dtype=call.mean_0.dtype)
    return torch.zeros(fields, T // CHUNK + R, N, D, dtype=call.mean_0.dtype)


def run_forward(call: Call, outputs: Outputs, isa: str, pool: str) -> None:
    """Run a forward pass on prepared tensors."""
    check(load().kla_scan_forward(_pack(call, outputs, isa, pool)))


def run_backward(
    call: Call,
    checkpoints: Tensor,
    inputs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    grads: tuple[Tensor | None, ...],
    isa: str,
    pool: str,
) -> None:
    """Run a backward pass.

    Args:
        call: prepared tensors of the forward pass.
        checkpoints: what it saved.
        inputs: gradients by y, y_var, mean, variance; None counts as 0.
        grads: the eight arrays to write, in the order of ``ScanGrads``.
        isa: instruction set.
        pool: thread pool.
    """
    dtype = call.mean_0.dtype
    dy, dy_var = (None if x is None else rows(x) for x in inputs[:2])
    dmean, dvariance = (None if x is None else dense(x, dtype) for x in inputs[2:])
    dq, dk, dv, dlam_v, *others = grads
    written = (dv, dlam_v, dk, dq, *others)  # in the order of the struct
    packed = _GRADS.pack(
        *array(dy), *array(dy_var), at(dmean), at(dvariance), *(at(x) for x in written)
    )
    outputs = Outputs(checkpoints=dense(checkpoints, dtype))
    check(load().kla_scan_backward(_pack(call, outputs, isa, pool), packed))


def run_filter_map(call: Call, isa: str, pool: str) -> Tensor:
    """Summaries of all rows, ``[5, R, N, D]`` in the order of ``FilterMap``."""
    found = call.mean_0.new_empty(5, *call.mean_0.shape)
    check(load().kla_scan_filter_map(_pack(call, Outputs(), isa, pool), at(found)))
    return found


def run_adjoint_map(
    call: Call, checkpoints: Tensor, dy: Tensor | None, dy_var: Tensor | None, isa: str, pool: str
) -> Tensor:
    """Summaries of all rows, ``[4, R, N, D]`` in the order of ``AdjointMap``."""
    dy, dy_var = (None if x is None else rows(x) for x in (dy, dy_var))
    saved = dense(checkpoints, call.mean_0.dtype)
    packed = _GRADS.pack(*array(dy), *array(dy_var), *([0] * 10))
    found = call.mean_0.new_empty(4, *call.mean_0.shape)
    params = _pack(call, Outputs(checkpoints=saved), isa, pool)
    check(load().kla_scan_adjoint_map(params, packed, at(found)))
    return found


def _pack(call: Call, out: Outputs, isa: str, pool: str) -> bytes:
    (B, T, D), (R, N, _), mask = call.v.shape, call.mean_0.shape, call.mask
    return PARAMS.pack(
        *(ABI_VERSION, call.model, DTYPES[call.mean_0.dtype], ISA[isa], POOL[pool]),
        *(torch.get_num_threads(), B, T, N, D, R),
        *array(call.v),
        *array(call.lam_v),
        *array(call.k),
        *array(call.q),
        *(NO_ARRAY if mask is None else (mask.data_ptr(), *mask.stride(), 0)),
        *(at(call.a_bar), at(call.p_bar), at(call.mean_0), at(call.variance_0)),
        *(at(call.cu_seqlens), *(at(x) for x in out)),
    )
