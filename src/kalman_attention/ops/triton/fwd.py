"""Forward pass and single step: the belief of a tile stays in registers while time advances.

In the lane-serial schedule ``filter_kernel`` is the whole pass. In the time-split schedule
``summary_kernel`` reduces each segment to five numbers per lane, ``starts_kernel`` carries the
initial belief over them, and ``filter_kernel`` replays every segment from its true start.
``step_kernel`` filters one token per row, for decoding.
"""

import torch
import triton.language as tl
from torch import Tensor

from kalman_attention.filtering.segment import FilterMap
from kalman_attention.ops.contract import CHUNK, ScanInputs, ScanResult
from kalman_attention.ops.triton.lane import (
    filter_step,
    filter_then,
    over_slots,
    reciprocal,
    seen,
)
from kalman_attention.ops.triton.launch import (
    OPTIONS,
    Tokens,
    kernel_decay,
    on_device,
    prepare,
    width_of,
)
from kalman_attention.ops.triton.place import (
    blocks_exist,
    chunks_of,
    dynamics_of,
    kernel,
    lanes_exist,
    lanes_of,
    locate,
    observe,
    read,
    span_of,
    squares,
    step_to,
    token_evidence,
    token_is_real,
)
from kalman_attention.ops.triton.schedule import (
    FORWARD_LANES,
    Schedule,
    lanes_for,
    schedule,
)
from kalman_attention.ops.triton.schedule import cut as cut_sizes

MAP_FIELDS = (2, len(FilterMap._fields) - 2)
"""Numbers in the summary of a segment: mu and eta per slot; s, gain and J per block."""


@kernel
def filter_kernel(
    q, k, v, lam_v, dt, mask, cu_seqlens,
    q_sb, q_st, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st, dt_sb, dt_st, dt_sd, mask_sb, mask_st,
    a_bar, p_bar, mean_starts, variance_starts, y, y_var, mean, variance, saved,
    T, N, G, D, chunks, blocks, segments, per_segment,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Filter one segment of a row from its start, [R, segments, N, D]; save beliefs on request."""
    row, segment, block = locate(0, segments, blocks)
    batch, first, end, chunk_0 = span_of(row, T, cu_seqlens, CHUNK)
    c0, c1, last = chunks_of(segment, per_segment, first, end, CHUNK)
    G = N if BLOCK_M == 1 else G  # one value, so that its offsets are computed once
    n, d, at, at_g, _first = lanes_of(block, N, G, D, BLOCK_M, BLOCK_G, BLOCK_D)
    _, has_d, has = lanes_exist(n, d, N, D)
    has_g = blocks_exist(has)
    DTYPE: tl.constexpr = a_bar.dtype.element_ty
    size, size_g = tl.cast(N, tl.int64) * D, tl.cast(G, tl.int64) * D
    GAPS: tl.constexpr = dt is not None
    a, p, half, _unit = dynamics_of(a_bar, p_bar, at_g, has_g, GAPS)
    number = row * segments + segment
    mu = tl.load(mean_starts + number * size + at, mask=has, other=0.0)
    s = tl.load(variance_starts + number * size_g + at_g, mask=has_g, other=0.0)
    for c in range(c0, c1):
        # The contract has a variance for every slot, so a shared one is stored for each.
        if saved is not None:
            tl.store(saved + (chunk_0 + c) * size + at, mu, mask=has)
            every_s = tl.broadcast_to(s, (BLOCK_M, BLOCK_G, BLOCK_D))
            tl.store(saved + (chunks + chunk_0 + c) * size + at, every_s, mask=has)
        for t in range(first + c * CHUNK, tl.minimum(first + (c + 1) * CHUNK, end)):
            real = token_is_real(mask, mask_sb, mask_st, batch, t, end)
            # At padding nothing is loaded: its memory may hold anything, even NaN.
            keep_n, keep_d = n < tl.where(real, N, 0), d < tl.where(real, D, 0)
            k_t, v_t, lam_v_t = observe(
                k, v, lam_v, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st,
                batch, t, n, d, keep_n, keep_d, DTYPE,
            )  # fmt: skip
            q_t = read(q, q_sb, q_st, batch, t, n, keep_n, DTYPE)
            phi, b = token_evidence(k_t, v_t, lam_v_t)
            a_t, p_t = step_to(a, p, half, dt, dt_sb, dt_st, dt_sd, batch, t, d, keep_d)
            s_new, mu_new, _r = filter_step(a_t, p_t, phi, b, s, mu, GAPS)
            s, mu = tl.where(real, s_new, s), tl.where(real, mu_new, mu)
            out = (batch * T + t) * D + d
            tl.store(y + out, over_slots(q_t[:, :, None] * mu), mask=has_d)
            if y_var is not None:
                tl.store(y_var + out, over_slots(squares(q_t)[:, :, None] * s), mask=has_d)
    if last:
        tl.store(mean + row * size + at, mu, mask=has)
        tl.store(variance + row * size_g + at_g, s, mask=has_g)


@kernel
def summary_kernel(
    q, k, v, lam_v, dt, mask, cu_seqlens,
    q_sb, q_st, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st, dt_sb, dt_st, dt_sd, mask_sb, mask_st,
    a_bar, p_bar, maps, block_maps,
    T, N, G, D, blocks, segments, per_segment, stride, block_stride,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The map of one segment.

    mu and eta go into [2, R, segments, N, D], ``stride`` apart; s, gain and J, which slots share,
    into [3, R, segments, G, D].
    """
    row, segment, block = locate(0, segments, blocks)
    batch, first, end, _ = span_of(row, T, cu_seqlens, CHUNK)
    c0, c1, _last = chunks_of(segment, per_segment, first, end, CHUNK)
    G = N if BLOCK_M == 1 else G  # one value, so that its offsets are computed once
    n, d, at, at_g, _first = lanes_of(block, N, G, D, BLOCK_M, BLOCK_G, BLOCK_D)
    has_n, has_d, has = lanes_exist(n, d, N, D)
    has_g = blocks_exist(has)
    DTYPE: tl.constexpr = a_bar.dtype.element_ty
    GAPS: tl.constexpr = dt is not None
    a, p, half, _unit = dynamics_of(a_bar, p_bar, at_g, has_g, GAPS)
    zero, zero_g = tl.full((BLOCK_M, BLOCK_G, BLOCK_D), 0.0, DTYPE), tl.zeros_like(p)
    s, mu, gain, J, eta = zero_g, zero, zero_g + 1.0, zero_g, zero
    for t in range(first + c0 * CHUNK, tl.minimum(first + c1 * CHUNK, end)):
        if token_is_real(mask, mask_sb, mask_st, batch, t, end):
            k_t, v_t, lam_v_t = observe(
                k, v, lam_v, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st,
                batch, t, n, d, has_n, has_d, DTYPE,
            )  # fmt: skip
            phi, b = token_evidence(k_t, v_t, lam_v_t)
            a_t, p_t = step_to(a, p, half, dt, dt_sb, dt_st, dt_sd, batch, t, d, has_d)
            s, mu, gain, J, eta = filter_then(a_t, p_t, phi, b, s, mu, gain, J, eta, GAPS)
    field, field_g = tl.cast(stride, tl.int64), tl.cast(block_stride, tl.int64)
    number = row * segments + segment
    out, out_g = maps + number * N * D + at, block_maps + number * G * D + at_g
    tl.store(out, mu, mask=has)
    tl.store(out + field, eta, mask=has)
    tl.store(out_g, s, mask=has_g)
    tl.store(out_g + field_g, gain, mask=has_g)
    tl.store(out_g + 2 * field_g, J, mask=has_g)


@kernel
def starts_kernel(
    cu_seqlens, maps, block_maps, mean_0, variance_0, mean_starts, variance_starts,
    T, N, G, D, blocks, segments, per_segment, stride, block_stride,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Carry the initial belief of a row over the maps of its segments, [R, segments, *, D]."""
    row, _, block = locate(0, 1, blocks)
    _, first, end, _ = span_of(row, T, cu_seqlens, CHUNK)
    G = N if BLOCK_M == 1 else G  # one value, so that its offsets are computed once
    n, d, at, at_g, _first = lanes_of(block, N, G, D, BLOCK_M, BLOCK_G, BLOCK_D)
    _, _, has = lanes_exist(n, d, N, D)
    has_g = blocks_exist(has)
    size, size_g = tl.cast(N, tl.int64) * D, tl.cast(G, tl.int64) * D
    field, field_g = tl.cast(stride, tl.int64), tl.cast(block_stride, tl.int64)
    mu = tl.load(mean_0 + row * size + at, mask=has, other=0.0)
    s = tl.load(variance_0 + row * size_g + at_g, mask=has_g, other=0.0)
    used = tl.maximum(tl.cdiv(tl.cdiv(end - first, CHUNK), per_segment), 1)
    for segment in range(0, used):
        here = (row * segments + segment) * size + at
        here_g = (row * segments + segment) * size_g + at_g
        tl.store(mean_starts + here, mu, mask=has)
        tl.store(variance_starts + here_g, s, mask=has_g)
        # Load each number where it is used: all five at once would exceed the registers.
        J = tl.load(block_maps + 2 * field_g + here_g, mask=has_g, other=0.0)
        scale = reciprocal(1.0 + J * s)
        eta = tl.load(maps + field + here, mask=has, other=0.0)
        mu = (mu + s * eta) * scale
        s = s * scale
        tl.debug_barrier()
        gain = tl.load(block_maps + field_g + here_g, mask=has_g, other=0.0)
        s = tl.load(block_maps + here_g, mask=has_g, other=0.0) + gain * (gain * s)
        mu = gain * mu
        tl.debug_barrier()
        mu += tl.load(maps + here, mask=has, other=0.0)


@on_device
def forward(inputs: ScanInputs, *, return_variance: bool, save: bool) -> ScanResult:
    """Filter every row; see ``EngineModule.forward``."""
    tokens = prepare(inputs)
    cut = schedule(inputs, FORWARD_LANES, tokens.dtype)
    T, (R, N, D), G = inputs.v.shape[1], inputs.mean_0.shape, inputs.a_bar.shape[0]
    y = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=inputs.v.device)
    y_var = torch.empty_like(y) if return_variance else None
    mean, variance = (torch.empty_like(x) for x in tokens.state_0)
    checkpoints = inputs.new_checkpoints(tokens.dtype) if save else None
    starts = tokens.state_0 if cut.segments == 1 else _starts(inputs, tokens, cut)
    filter_kernel[(R * cut.segments * cut.blocks,)](
        *tokens.arrays, *tokens.strides, *tokens.dynamics, *starts,
        y, y_var, mean, variance, checkpoints,
        T, N, G, D, inputs.chunks, cut.blocks, cut.segments, cut.per_segment,
        CHUNK, *cut.tile, **OPTIONS,
    )  # fmt: skip
    dtype = inputs.compute_dtype
    saved = None if checkpoints is None else checkpoints.to(dtype)
    return ScanResult(y, y_var, mean.to(dtype), variance.to(dtype), saved)


def _starts(inputs: ScanInputs, tokens: Tokens, cut: Schedule) -> tuple[Tensor, Tensor]:
    """Belief before every segment, [R, segments, N, D] and [R, segments, G, D]."""
    T, (R, N, D), cu_seqlens = inputs.v.shape[1], inputs.mean_0.shape, tokens.arrays[-1]
    G, like = inputs.a_bar.shape[0], tokens.state_0[0]
    shapes = (R, cut.segments, N, D), (R, cut.segments, G, D)
    maps, block_maps = (like.new_empty(f, *x) for f, x in zip(MAP_FIELDS, shapes, strict=True))
    starts = like.new_empty(shapes[0]), like.new_empty(shapes[1])
    strides = maps.stride(0), block_maps.stride(0)
    sizes = (T, N, G, D, cut.blocks, cut.segments, cut.per_segment, *strides)
    summary_kernel[(R * cut.segments * cut.blocks,)](
        *tokens.arrays, *tokens.strides, *tokens.dynamics, maps, block_maps,
        *sizes, CHUNK, *cut.tile, **OPTIONS,
    )  # fmt: skip
    starts_kernel[(R * cut.blocks,)](
        cu_seqlens, maps, block_maps, *tokens.state_0, *starts, *sizes, CHUNK, *cut.tile, **OPTIONS
    )
    return starts


@kernel
def step_kernel(
    q, k, v, lam_v, dt, mask, q_sb, k_sb, v_sb, lam_v_sb, dt_sb, dt_sd, mask_sb,
    a_bar, p_bar, mean_0, variance_0, y, y_var, mean, variance, N, G, D, blocks,
    BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Filter one token of one row."""
    row, _, block = locate(0, 1, blocks)
    G = N if BLOCK_M == 1 else G  # one value, so that its offsets are computed once
    n, d, at, at_g, _first = lanes_of(block, N, G, D, BLOCK_M, BLOCK_G, BLOCK_D)
    _, has_d, has = lanes_exist(n, d, N, D)
    has_g = blocks_exist(has)
    DTYPE: tl.constexpr = a_bar.dtype.element_ty
    here, here_g = row * N * D + at, row * G * D + at_g
    s = tl.load(variance_0 + here_g, mask=has_g, other=0.0)
    mu = tl.load(mean_0 + here, mask=has, other=0.0)
    real = row >= 0 if mask is None else tl.load(mask + row * mask_sb) != 0
    keep_n, keep_d = n < tl.where(real, N, 0), d < tl.where(real, D, 0)
    q_t = tl.load(q + row * q_sb + n, mask=keep_n, other=0.0).to(DTYPE)
    k_t = tl.load(k + row * k_sb + n, mask=keep_n, other=0.0).to(DTYPE)
    v_t = tl.load(v + row * v_sb + d, mask=keep_d, other=0.0).to(DTYPE)
    lam_v_t = tl.load(lam_v + row * lam_v_sb + d, mask=keep_d, other=0.0).to(DTYPE)
    GAPS: tl.constexpr = dt is not None
    a, p, half, _unit = dynamics_of(a_bar, p_bar, at_g, has_g, GAPS)
    a, p = step_to(a, p, half, dt, dt_sb, 0, dt_sd, row, 0, d, keep_d)
    phi, b = token_evidence(k_t, seen(v_t, lam_v_t), lam_v_t)
    s_new, mu_new, _r = filter_step(a, p, phi, b, s, mu, GAPS)
    s, mu = tl.where(real, s_new, s), tl.where(real, mu_new, mu)
    tl.store(mean + here, mu, mask=has)
    tl.store(variance + here_g, s, mask=has_g)
    tl.store(y + row * D + d, over_slots(q_t[:, :, None] * mu), mask=has_d)
    if y_var is not None:
        tl.store(y_var + row * D + d, over_slots(squares(q_t)[:, :, None] * s), mask=has_d)


@on_device
def step(inputs: ScanInputs, *, return_variance: bool) -> ScanResult:
    """Filter one token per row: ``forward`` for inputs without the T axis.

    Args:
        inputs: q, k ``[B, N]``, v, lam_v ``[B, D]``, mask ``[B]``.
        return_variance: also compute y_var.

    Returns:
        y and y_var ``[B, D]``, the new belief, no checkpoints.
    """
    dtype = inputs.compute_dtype
    q, k, v, lam_v, a_bar, p_bar, mean_0, variance_0, mask, *_ = inputs.dense(dtype)
    a_bar, dt = kernel_decay(inputs, a_bar), inputs.dt
    mask = None if mask is None else mask.view(torch.uint8)
    (R, N, D), G = mean_0.shape, len(a_bar)
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    y_var = torch.empty_like(y) if return_variance else None
    mean, variance = torch.empty_like(mean_0), torch.empty_like(variance_0)
    plan = cut_sizes(R, 1, N, D, lanes_for(dtype, FORWARD_LANES), N // G)
    strides = [x.stride(0) for x in (q, k, v, lam_v)]
    strides += (0, 0) if dt is None else (dt.stride(0), width_of(dt))
    strides.append(0 if mask is None else mask.stride(0))
    step_kernel[(R * plan.blocks,)](
        q, k, v, lam_v, dt, mask, *strides,
        a_bar, p_bar, mean_0, variance_0, y, y_var, mean, variance,
        N, G, D, plan.blocks, *plan.tile, **OPTIONS,
    )  # fmt: skip
    return ScanResult(y, y_var, mean, variance, None)
