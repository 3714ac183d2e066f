"""Forward, backward and single step of the native CPU engine, as the engine contract asks.

The C structs consist of 64-bit words only, so a call packs plain integers instead of filling a
ctypes structure field by field, which would cost more than a decode step.
"""

import struct

import torch
from torch import Tensor

from kalman_attention.ops.contract import ScanGrads, ScanInputs, ScanResult
from kalman_attention.ops.cpu.library import ABI_VERSION, ISA, POOL, check, load

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_PARAMS = struct.Struct("=41q")
_GRADS = struct.Struct("=18q")
_KALMAN = 0
_NO_ARRAY = (0, 0, 0, 0)


def forward(
    inputs: ScanInputs,
    *,
    return_variance: bool,
    save: bool,
    isa: str = "auto",
    pool: str = "auto",
) -> ScanResult:
    """Filter every row.

    Args:
        inputs: validated arguments on the CPU.
        return_variance: also compute y_var.
        save: keep the belief before each chunk, for ``backward``.
        isa: instruction set, for tests.
        pool: thread pool, for tests.

    Returns:
        Outputs, last beliefs and checkpoints.
    """
    x = _prepare(inputs)
    y = torch.empty(x.v.shape, dtype=x.v.dtype)
    y_var = torch.empty_like(y) if return_variance else None
    mean, variance = torch.empty_like(x.mean_0), torch.empty_like(x.mean_0)
    checkpoints = None
    if save:
        # Packed documents leave some slots unwritten.
        new = torch.empty if x.cu_seqlens is None else torch.zeros
        checkpoints = new(2, x.chunks, *x.mean_0.shape[1:], dtype=mean.dtype)
    params = _pack(x, y, y_var, mean, variance, checkpoints, isa, pool)
    check(load().kla_scan_forward(params))
    dtype = inputs.compute_dtype
    saved = None if checkpoints is None else checkpoints.to(dtype)
    return ScanResult(y, y_var, mean.to(dtype), variance.to(dtype), saved)


def backward(
    inputs: ScanInputs,
    checkpoints: Tensor,
    dy: Tensor | None,
    dy_var: Tensor | None,
    dmean: Tensor | None,
    dvariance: Tensor | None,
    *,
    isa: str = "auto",
    pool: str = "auto",
) -> ScanGrads:
    """Exact gradients of the eight floating inputs.

    Args:
        inputs: the arguments of the forward pass.
        checkpoints: what it saved.
        dy: gradient by y, or None for 0.
        dy_var: gradient by y_var, or None for 0.
        dmean: gradient by the last mean, or None for 0.
        dvariance: gradient by the last variance, or None for 0.
        isa: instruction set, for tests.
        pool: thread pool, for tests.

    Returns:
        Gradients in the shapes and dtypes of the inputs.
    """
    x = _prepare(inputs)
    dtype = x.mean_0.dtype
    grads = ScanGrads(*(torch.empty(t.shape, dtype=t.dtype) for t in x[:8]))
    dy, dy_var = (None if t is None else _rows(t) for t in (dy, dy_var))
    dmean, dvariance = (None if t is None else _dense(t, dtype) for t in (dmean, dvariance))
    checkpoints = _dense(checkpoints, dtype)
    packed = _GRADS.pack(
        *_array(dy), *_array(dy_var), _at(dmean), _at(dvariance), *(t.data_ptr() for t in grads)
    )
    params = _pack(x, None, None, None, None, checkpoints, isa, pool)
    check(load().kla_scan_backward(params, packed))
    return ScanGrads(*(g.to(t.dtype) for g, t in zip(grads, inputs[:8], strict=True)))


def step(inputs: ScanInputs, *, return_variance: bool) -> ScanResult:
    """Filter one token per row: ``forward`` for inputs without the T axis.

    Args:
        inputs: v, lam_v ``[B, D]``, k, q ``[B, N]``, mask ``[B]``.
        return_variance: also compute y_var.

    Returns:
        y and y_var ``[B, D]``, the new belief, no checkpoints.
    """
    # Written out flat: at a few microseconds per kernel call every helper would show.
    dtype = torch.float64 if inputs.v.dtype is torch.float64 else torch.float32
    v, lam_v, k, q, a_bar, p_bar, mean_0, variance_0, mask, _ = inputs
    v, lam_v, k, q = v.contiguous(), lam_v.contiguous(), k.contiguous(), q.contiguous()
    a_bar, p_bar = _dense(a_bar, dtype), _dense(p_bar, dtype)
    mean_0, variance_0 = _dense(mean_0, dtype), _dense(variance_0, dtype)
    R, N, D = mean_0.shape
    y, mean, variance = torch.empty_like(v), torch.empty_like(mean_0), torch.empty_like(mean_0)
    y_var = torch.empty_like(v) if return_variance else None
    params = _PARAMS.pack(
        *(ABI_VERSION, _KALMAN, _DTYPES[dtype], 0, 0, torch.get_num_threads(), R, 1, N, D, R),
        *(v.data_ptr(), D, 0, _DTYPES[v.dtype], lam_v.data_ptr(), D, 0, _DTYPES[lam_v.dtype]),
        *(k.data_ptr(), N, 0, _DTYPES[k.dtype], q.data_ptr(), N, 0, _DTYPES[q.dtype]),
        *(_NO_ARRAY if mask is None else (mask.data_ptr(), mask.stride(0), 0, 0)),
        *(a_bar.data_ptr(), p_bar.data_ptr(), mean_0.data_ptr(), variance_0.data_ptr(), 0),
        *(y.data_ptr(), _at(y_var), mean.data_ptr(), variance.data_ptr(), 0),
    )
    check(load().kla_scan_forward(params))
    return ScanResult(y, y_var, mean, variance, None)


def _pack(
    x: ScanInputs,
    y: Tensor | None,
    y_var: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    checkpoints: Tensor | None,
    isa: str,
    pool: str,
) -> bytes:
    (R, N, D), (B, T, _) = x.mean_0.shape, x.v.shape
    return _PARAMS.pack(
        *(ABI_VERSION, _KALMAN, _DTYPES[x.mean_0.dtype], ISA[isa], POOL[pool]),
        *(torch.get_num_threads(), B, T, N, D, R),
        *_array(x.v),
        *_array(x.lam_v),
        *_array(x.k),
        *_array(x.q),
        *(_NO_ARRAY if x.mask is None else (x.mask.data_ptr(), *x.mask.stride(), 0)),
        *(x.a_bar.data_ptr(), x.p_bar.data_ptr(), x.mean_0.data_ptr(), x.variance_0.data_ptr()),
        *(_at(x.cu_seqlens), _at(y), _at(y_var), _at(mean), _at(variance), _at(checkpoints)),
    )


def _prepare(x: ScanInputs) -> ScanInputs:
    """Rows with a contiguous last axis, dense dynamics and beliefs; copies only what is not so."""
    dtype = x.arithmetic_dtype
    cu_seqlens = x.cu_seqlens
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
    return ScanInputs(
        _rows(x.v),
        _rows(x.lam_v),
        _rows(x.k),
        _rows(x.q),
        _dense(x.a_bar, dtype),
        _dense(x.p_bar, dtype),
        _dense(x.mean_0, dtype),
        _dense(x.variance_0, dtype),
        x.mask,
        cu_seqlens,
    )


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Asking first is ten times cheaper than a Tensor.to that has nothing to do.
    return x.contiguous() if x.dtype is dtype else x.to(dtype).contiguous()


def _array(x: Tensor | None) -> tuple[int, int, int, int]:
    if x is None:
        return _NO_ARRAY
    return (x.data_ptr(), x.stride(0), x.stride(1), _DTYPES[x.dtype])


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
