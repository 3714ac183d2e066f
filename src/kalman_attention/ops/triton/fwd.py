"""Forward pass: walk time with the belief of a tile in registers.

Lane-serial, ``filter_kernel`` does it all. Time-split, ``summary_kernel`` reduces each segment to
five numbers per lane, ``starts_kernel`` carries the first belief over them, and ``filter_kernel``
replays every segment from where it truly starts.
"""

import torch
import triton.language as tl
from torch import Tensor

from kalman_attention.filtering.segment import FilterMap
from kalman_attention.ops.contract import CHUNK, ScanInputs, ScanResult
from kalman_attention.ops.triton.lane import filter_step, filter_then, reciprocal
from kalman_attention.ops.triton.launch import OPTIONS, Tokens, on_device, prepare
from kalman_attention.ops.triton.place import (
    chunks_of,
    kernel,
    lanes_of,
    locate,
    observe,
    read,
    span_of,
    token_evidence,
    token_is_real,
)
from kalman_attention.ops.triton.schedule import FORWARD_LANES, Schedule, schedule

MAP_FIELDS = len(FilterMap._fields)
"""Numbers per lane in the summary of a segment."""


@kernel
def filter_kernel(
    q, k, v, lam_v, mask, cu_seqlens,
    q_sb, q_st, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st, mask_sb, mask_st,
    a_bar, p_bar, mean_starts, variance_starts, y, y_var, mean, variance, saved,
    T, N, D, chunks, blocks, segments, per_segment,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Filter one segment of a row from its start, [R, segments, N, D]; save beliefs if asked."""
    row, segment, block = locate(0, segments, blocks)
    batch, first, end, chunk_0 = span_of(row, T, cu_seqlens, CHUNK)
    c0, c1, last = chunks_of(segment, per_segment, first, end, CHUNK)
    n, d, at, has_n, has_d = lanes_of(block, N, D, BLOCK_N, BLOCK_D)
    has = has_n[:, None] & has_d[None, :]
    DTYPE: tl.constexpr = a_bar.dtype.element_ty
    size = tl.cast(N, tl.int64) * D
    a = tl.load(a_bar + at, mask=has, other=0.0)
    p = tl.load(p_bar + at, mask=has, other=0.0)
    start = (row * segments + segment) * size + at
    mu = tl.load(mean_starts + start, mask=has, other=0.0)
    s = tl.load(variance_starts + start, mask=has, other=0.0)
    for c in range(c0, c1):
        if saved is not None:
            tl.store(saved + (chunk_0 + c) * size + at, mu, mask=has)
            tl.store(saved + (chunks + chunk_0 + c) * size + at, s, mask=has)
        for t in range(first + c * CHUNK, tl.minimum(first + (c + 1) * CHUNK, end)):
            real = token_is_real(mask, mask_sb, mask_st, batch, t, end)
            keep_n, keep_d = n < tl.where(real, N, 0), d < tl.where(real, D, 0)
            k_t, v_t, lam_v_t = observe(
                k, v, lam_v, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st,
                batch, t, n, d, keep_n, keep_d, DTYPE,
            )  # fmt: skip
            q_t = read(q, q_sb, q_st, batch, t, n, keep_n, DTYPE)
            phi, b = token_evidence(k_t, v_t, lam_v_t)
            s_new, mu_new, _r = filter_step(a, p, phi, b, s, mu)
            s, mu = tl.where(real, s_new, s), tl.where(real, mu_new, mu)
            out = (batch * T + t) * D + d
            tl.store(y + out, tl.sum(q_t[:, None] * mu, axis=0), mask=has_d)
            if y_var is not None:
                tl.store(y_var + out, tl.sum((q_t * q_t)[:, None] * s, axis=0), mask=has_d)
    if last:
        tl.store(mean + row * size + at, mu, mask=has)
        tl.store(variance + row * size + at, s, mask=has)


@kernel
def summary_kernel(
    q, k, v, lam_v, mask, cu_seqlens,
    q_sb, q_st, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st, mask_sb, mask_st,
    a_bar, p_bar, maps,
    T, N, D, blocks, segments, per_segment, stride,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The map of one segment, into [5, R, segments, N, D]; fields are ``stride`` apart."""
    row, segment, block = locate(0, segments, blocks)
    batch, first, end, _ = span_of(row, T, cu_seqlens, CHUNK)
    c0, c1, _last = chunks_of(segment, per_segment, first, end, CHUNK)
    n, d, at, has_n, has_d = lanes_of(block, N, D, BLOCK_N, BLOCK_D)
    has = has_n[:, None] & has_d[None, :]
    DTYPE: tl.constexpr = a_bar.dtype.element_ty
    a = tl.load(a_bar + at, mask=has, other=0.0)
    p = tl.load(p_bar + at, mask=has, other=0.0)
    zero = tl.full((BLOCK_N, BLOCK_D), 0.0, DTYPE)
    s, mu, gain, J, eta = zero, zero, zero + 1.0, zero, zero
    for t in range(first + c0 * CHUNK, tl.minimum(first + c1 * CHUNK, end)):
        if token_is_real(mask, mask_sb, mask_st, batch, t, end):
            k_t, v_t, lam_v_t = observe(
                k, v, lam_v, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st,
                batch, t, n, d, has_n, has_d, DTYPE,
            )  # fmt: skip
            phi, b = token_evidence(k_t, v_t, lam_v_t)
            s, mu, gain, J, eta = filter_then(a, p, phi, b, s, mu, gain, J, eta)
    field = tl.cast(stride, tl.int64)
    out = maps + (row * segments + segment) * N * D + at
    tl.store(out, s, mask=has)
    tl.store(out + field, mu, mask=has)
    tl.store(out + 2 * field, gain, mask=has)
    tl.store(out + 3 * field, J, mask=has)
    tl.store(out + 4 * field, eta, mask=has)


@kernel
def starts_kernel(
    cu_seqlens, maps, mean_0, variance_0, mean_starts, variance_starts,
    T, N, D, blocks, segments, per_segment, stride,
    CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Carry the first belief of a row over the maps of its segments, [R, segments, N, D]."""
    row, _, block = locate(0, 1, blocks)
    _, first, end, _ = span_of(row, T, cu_seqlens, CHUNK)
    _, _, at, has_n, has_d = lanes_of(block, N, D, BLOCK_N, BLOCK_D)
    has = has_n[:, None] & has_d[None, :]
    size = tl.cast(N, tl.int64) * D
    field = tl.cast(stride, tl.int64)
    mu = tl.load(mean_0 + row * size + at, mask=has, other=0.0)
    s = tl.load(variance_0 + row * size + at, mask=has, other=0.0)
    used = tl.maximum(tl.cdiv(tl.cdiv(end - first, CHUNK), per_segment), 1)
    for segment in range(0, used):
        here = (row * segments + segment) * size + at
        tl.store(mean_starts + here, mu, mask=has)
        tl.store(variance_starts + here, s, mask=has)
        # Read where it is used: all five at once do not fit beside the belief.
        J = tl.load(maps + 3 * field + here, mask=has, other=0.0)
        scale = reciprocal(1.0 + J * s)
        eta = tl.load(maps + 4 * field + here, mask=has, other=0.0)
        mu = (mu + s * eta) * scale
        s = s * scale
        tl.debug_barrier()
        gain = tl.load(maps + 2 * field + here, mask=has, other=0.0)
        mu = tl.load(maps + field + here, mask=has, other=0.0) + gain * mu
        s = tl.load(maps + here, mask=has, other=0.0) + gain * (gain * s)


@on_device
def forward(inputs: ScanInputs, *, return_variance: bool, save: bool) -> ScanResult:
    """Filter every row; see ``EngineModule.forward``."""
    tokens = prepare(inputs)
    cut = schedule(inputs, FORWARD_LANES, tokens.dtype)
    T, (R, N, D), device = inputs.v.shape[1], inputs.mean_0.shape, inputs.v.device
    y = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=device)
    y_var = torch.empty_like(y) if return_variance else None
    mean, variance = (torch.empty_like(x) for x in tokens.state_0)
    checkpoints = inputs.new_checkpoints(tokens.dtype) if save else None
    starts = tokens.state_0 if cut.segments == 1 else _starts(inputs, tokens, cut)
    filter_kernel[(R * cut.segments * cut.blocks,)](
        *tokens.arrays, *tokens.strides, *tokens.dynamics, *starts,
        y, y_var, mean, variance, checkpoints,
        T, N, D, inputs.chunks, cut.blocks, cut.segments, cut.per_segment,
        CHUNK, cut.block_n, cut.block_d, **OPTIONS,
    )  # fmt: skip
    dtype = inputs.compute_dtype
    saved = None if checkpoints is None else checkpoints.to(dtype)
    return ScanResult(y, y_var, mean.to(dtype), variance.to(dtype), saved)


def _starts(inputs: ScanInputs, tokens: Tokens, cut: Schedule) -> tuple[Tensor, Tensor]:
    """Belief before every segment, [R, segments, N, D] twice."""
    T, (R, N, D), cu_seqlens = inputs.v.shape[1], inputs.mean_0.shape, tokens.arrays[-1]
    shape, like = (R, cut.segments, N, D), tokens.state_0[0]
    maps = like.new_empty(MAP_FIELDS, *shape)
    starts = like.new_empty(shape), like.new_empty(shape)
    sizes = (T, N, D, cut.blocks, cut.segments, cut.per_segment, maps.stride(0))
    tile = (CHUNK, cut.block_n, cut.block_d)
    summary_kernel[(R * cut.segments * cut.blocks,)](
        *tokens.arrays, *tokens.strides, *tokens.dynamics, maps, *sizes, *tile, **OPTIONS
    )
    starts_kernel[(R * cut.blocks,)](
        cu_seqlens, maps, *tokens.state_0, *starts, *sizes, *tile, **OPTIONS
    )
    return starts
