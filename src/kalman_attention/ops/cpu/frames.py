"""Keys and queries in the rotating frame: one native pass forward, one backward."""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention.ops.contract import DTYPES, NO_ARRAY, FrameInputs, array, at, rows
from kalman_attention.ops.cpu.library import ABI_VERSION, ISA, check, load

_PARAMS = struct.Struct("=30q")
_GRADS = struct.Struct("=12q")

# The kernel keeps a whole m x m frame in fixed-size arrays.
MAX_SLOTS = 32
"""Slots of the largest block, ``KLA_MAX_FRAME`` of ``csrc/kla_scan.h``."""


class FrameGrads(NamedTuple):
    """Gradients with respect to the three floating inputs, in their shapes."""

    q: Tensor
    k: Tensor
    u_h: Tensor


def frames_forward(call: FrameInputs, *, isa: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Rotate keys and queries into the frame.

    Args:
        call: the inputs, float32 or float64.
        isa: instruction set, for tests.

    Returns:
        Rotated q and k, ``[B, T, N]``, and the last frames, ``[R, G, m, m]`` float64.
    """
    q, k = (torch.empty(call.q.shape, dtype=call.q.dtype) for _ in range(2))
    frame = torch.empty(call.frame_shape, dtype=torch.float64)
    call = _laid_out(call)
    check(load().kla_frames_forward(_pack(call, isa, q, k, frame)))
    return q, k, frame


def frames_backward(
    call: FrameInputs,
    frame: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dframe: Tensor | None,
    *,
    isa: str = "auto",
) -> FrameGrads:
    """Backward pass of ``frames_forward``.

    Args:
        call: as in the forward pass.
        frame: the last frames, as returned by the forward pass.
        dq: gradient with respect to rotated q, ``[B, T, N]``; None means 0.
        dk: gradient with respect to rotated k; None means 0.
        dframe: gradient with respect to the last frames; None means 0.
        isa: instruction set, for tests.
    """
    grads = FrameGrads(*(torch.empty(x.shape, dtype=x.dtype) for x in call[:3]))
    call, frame = _laid_out(call), frame.contiguous()
    dq, dk = (None if x is None else rows(x.to(call.q.dtype)) for x in (dq, dk))
    dframe = None if dframe is None else dframe.to(torch.float64).contiguous()
    params = _pack(call, isa, None, None, frame)
    packed = _GRADS.pack(*array(dq), *array(dk), at(dframe), *(at(x) for x in grads))
    check(load().kla_frames_backward(params, packed))
    return grads


def _laid_out(call: FrameInputs) -> FrameInputs:
    u_h, m = call.u_h, call.u_h.shape[-1]
    if u_h.stride()[2:] != (u_h.shape[3] * m, m, 1):
        u_h = u_h.contiguous()
    bounds = call.cu_seqlens
    if bounds is not None:
        bounds = bounds.to(torch.int64).contiguous()
    return FrameInputs(rows(call.q), rows(call.k), u_h, call.mask, bounds)


def _pack(call: FrameInputs, isa: str, q: Tensor | None, k: Tensor | None, frame: Tensor) -> bytes:
    B, T, n_h, G, m = call.u_h.shape
    mask = call.mask
    return _PARAMS.pack(
        *(ABI_VERSION, ISA[isa], torch.get_num_threads(), DTYPES[call.q.dtype]),
        *(B, T, G, m, n_h, len(frame)),
        *array(call.q),
        *array(call.k),
        *array(call.u_h),
        *(NO_ARRAY if mask is None else (mask.data_ptr(), *mask.stride(), 0)),
        *(at(call.cu_seqlens), at(q), at(k), at(frame)),
    )
