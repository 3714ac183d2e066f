"""Backward pass: chunks in reverse, replayed from their checkpoints, with scalar adjoints.

A chunk is replayed twice: once to store the belief before every window of a few tokens, then window
by window, from the last to the first, to store the belief before every token of that window. The
adjoints of mean and variance walk back over these. Both kinds of beliefs go to a scratch array of
16 KiB per warp, which the L2 cache can hold; a path of 64 tokens would not fit.

Given the beliefs, an adjoint passes a segment by an affine map, so time can be split here too:
``adjoint_summary_kernel`` reduces every segment to four numbers per lane in one forward pass,
``incoming_kernel`` carries the final adjoint over them, and ``adjoint_kernel`` walks back with the
adjoint that arrives at each segment. ``sum_kernel`` adds up partial sums over programs, in the
order of their numbers, so that results are the same on every run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kalman_attention.filtering.segment import AdjointMap
from kalman_attention.ops.contract import CHUNK, ScanGrads, ScanInputs, dense, rows
from kalman_attention.ops.triton.lane import (
    adjoint_then,
    faded,
    filter_adjoint,
    filter_step,
    gap_adjoint,
    over_slots,
    per_block,
    remainder,
)
from kalman_attention.ops.triton.launch import OPTIONS, Tokens, on_device, prepare
from kalman_attention.ops.triton.place import (
    blocks_exist,
    chunks_of,
    dynamics_of,
    gap_before,
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
    BACKWARD_LANES,
    WINDOW,
    Schedule,
    ceil,
    schedule,
    wave_rows,
)

MAP_FIELDS = (2, len(AdjointMap._fields) - 2)
"""Numbers in the summary of a segment: cross and dmu_0 per slot; gain and ds_0 per block."""


@triton.jit
def replay(
    k, v, lam_v, dt, mask, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st,
    dt_sb, dt_st, dt_sd, mask_sb, mask_st,
    a, p, half, mu, s, into, batch, begin, stop, n, d, lane, block_lane, N, D,
    EVERY: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Filter the tokens from begin to stop; store the belief before every EVERY-th of them."""
    for i in range(0, tl.cdiv(stop - begin, EVERY)):
        tl.store(into + 2 * i * TILE + lane, mu)
        tl.store(into + (2 * i + 1) * TILE + block_lane, s)
        for t in range(begin + i * EVERY, tl.minimum(begin + (i + 1) * EVERY, stop)):
            real = token_is_real(mask, mask_sb, mask_st, batch, t, stop)
            keep_n, keep_d = n < tl.where(real, N, 0), d < tl.where(real, D, 0)
            k_t, v_t, lam_v_t = observe(
                k, v, lam_v, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st,
                batch, t, n, d, keep_n, keep_d, DTYPE,
            )  # fmt: skip
            phi, b = token_evidence(k_t, v_t, lam_v_t)
            a_t, p_t = step_to(a, p, half, dt, dt_sb, dt_st, dt_sd, batch, t, d, keep_d)
            s_new, mu_new, _r = filter_step(a_t, p_t, phi, b, s, mu, dt is not None)
            s, mu = tl.where(real, s_new, s), tl.where(real, mu_new, mu)
    tl.debug_barrier()  # the same warp loads what it has just stored


@kernel
def adjoint_kernel(
    q, k, v, lam_v, dt, mask, cu_seqlens,
    q_sb, q_st, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st, dt_sb, dt_st, dt_sd, mask_sb, mask_st,
    a_bar, p_bar, saved, path, dy, dy_var, dy_sb, dy_st, dy_var_sb, dy_var_st,
    dmean_ends, dvariance_ends, dq, dk, dv, dlam_v, ddt, dynamics, dmean_0, dvariance_0,
    first_row, B, T, N, G, D, chunks, blocks, segments, per_segment, stride,
    CHUNK: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Walk back over one segment of a row and collect all gradients.

    The adjoint that arrives is [R, segments, N, D] and [R, segments, G, D]. dk and dq are sums over
    this block of channels, [blocks, B, T, N]; ``dynamics`` collects da_bar and dp_bar in float64,
    [2, R, segments, G, D], with ``stride`` between them. With gaps, da_bar is the gradient with
    respect to -log a_bar, and ddt is [B, T, D] for any width of dt.
    """
    row, segment, block = locate(first_row, segments, blocks)
    batch, first, end, chunk_0 = span_of(row, T, cu_seqlens, CHUNK)
    c0, c1, _last = chunks_of(segment, per_segment, first, end, CHUNK)
    G = N if BLOCK_M == 1 else G  # one value, so that its offsets are computed once
    n, d, at, at_g, at_first = lanes_of(block, N, G, D, BLOCK_M, BLOCK_G, BLOCK_D)
    has_n, has_d, has = lanes_exist(n, d, N, D)
    has_g = blocks_exist(has)
    DTYPE: tl.constexpr = a_bar.dtype.element_ty
    WINDOWS: tl.constexpr = CHUNK // WINDOW
    size, size_g = tl.cast(N, tl.int64) * D, tl.cast(G, tl.int64) * D
    field = tl.cast(stride, tl.int64)
    GAPS: tl.constexpr = dt is not None
    a, p, half, unit = dynamics_of(a_bar, p_bar, at_g, has_g, GAPS)
    here = (row * segments + segment) * size + at
    here_g = (row * segments + segment) * size_g + at_g
    dmu = tl.load(dmean_ends + here, mask=has, other=0.0)
    ds = tl.load(dvariance_ends + here_g, mask=has_g, other=0.0)
    # Scratch tiles belong to this program alone, so a lane's offset is known at compile time.
    channel, g = tl.arange(0, BLOCK_D)[None, None, :], tl.arange(0, BLOCK_G)[None, :, None]
    block_lane = g * BLOCK_D + channel
    lane = block_lane + tl.arange(0, BLOCK_M)[:, None, None] * (BLOCK_G * BLOCK_D)
    TILE: tl.constexpr = BLOCK_G * BLOCK_M * BLOCK_D
    coarse = path + tl.program_id(0).to(tl.int64) * (2 * (WINDOWS + WINDOW) * TILE)
    fine = coarse + 2 * WINDOWS * TILE
    for back in range(0, c1 - c0):  # chunks, from the last to the first
        c = c1 - 1 - back
        begin = first + c * CHUNK
        stop = tl.minimum(begin + CHUNK, end)
        mu = tl.load(saved + (chunk_0 + c) * size + at, mask=has, other=0.0)
        s = tl.load(saved + (chunks + chunk_0 + c) * size + at_first, mask=has_g, other=0.0)
        replay(
            k, v, lam_v, dt, mask, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st,
            dt_sb, dt_st, dt_sd, mask_sb, mask_st,
            a, p, half, mu, s, coarse, batch, begin, stop, n, d, lane, block_lane, N, D,
            WINDOW, TILE, DTYPE,
        )  # fmt: skip
        da, dp = tl.zeros_like(p), tl.zeros_like(p)
        windows = tl.cdiv(stop - begin, WINDOW)
        for back_w in range(0, windows):  # windows of the chunk, from the last to the first
            w = windows - 1 - back_w
            begin_w = begin + w * WINDOW
            stop_w = tl.minimum(begin_w + WINDOW, stop)
            mu = tl.load(coarse + 2 * w * TILE + lane)
            s = tl.load(coarse + (2 * w + 1) * TILE + block_lane)
            replay(
                k, v, lam_v, dt, mask, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st,
                dt_sb, dt_st, dt_sd, mask_sb, mask_st,
                a, p, half, mu, s, fine, batch, begin_w, stop_w, n, d, lane, block_lane, N, D,
                1, TILE, DTYPE,
            )  # fmt: skip
            for back_t in range(0, stop_w - begin_w):  # tokens of the window, backwards
                t = stop_w - 1 - back_t
                mu = tl.load(fine + 2 * (t - begin_w) * TILE + lane)
                s = tl.load(fine + (2 * (t - begin_w) + 1) * TILE + block_lane)
                real = token_is_real(mask, mask_sb, mask_st, batch, t, end)
                keep_n, keep_d = n < tl.where(real, N, 0), d < tl.where(real, D, 0)
                k_t, v_t, lam_v_t = observe(
                    k, v, lam_v, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st,
                    batch, t, n, d, keep_n, keep_d, DTYPE,
                )  # fmt: skip
                q_t = read(q, q_sb, q_st, batch, t, n, keep_n, DTYPE)
                phi, b = token_evidence(k_t, v_t, lam_v_t)
                a_t, p_t = step_to(a, p, half, dt, dt_sb, dt_st, dt_sd, batch, t, d, keep_d)
                s_new, mu_new, r = filter_step(a_t, p_t, phi, b, s, mu, GAPS)
                dq_n = tl.full((BLOCK_M, BLOCK_G), 0.0, DTYPE)
                if dy is not None:
                    dy_t = read(dy, dy_sb, dy_st, batch, t, d, keep_d, DTYPE)
                    dmu += q_t[:, :, None] * dy_t[None, None, :]
                    dq_n += tl.sum(mu_new * dy_t[None, None, :], axis=2)
                if dy_var is not None:
                    dy_var_t = read(dy_var, dy_var_sb, dy_var_st, batch, t, d, keep_d, DTYPE)
                    ds += squares(q_t)[:, :, None] * dy_var_t[None, None, :]
                    dq_n += 2.0 * q_t * tl.sum(s_new * dy_var_t[None, None, :], axis=2)
                k2 = squares(k_t)
                rest = remainder(k_t, k2, v_t, faded(a_t, mu, GAPS), r)
                dmu_back, ds_back, mu_g, dP, db, dphi, dlam_v_t = filter_adjoint(
                    a_t, k2, lam_v_t, mu, s_new, mu_new, r, rest, dmu, ds, GAPS
                )
                if dt is None:
                    a_dP = a * dP
                    da_t, dp_t = mu_g + s * (a_dP + a_dP), dP
                else:
                    gap = gap_before(dt, dt_sb, dt_st, dt_sd, batch, t, d, keep_d, DTYPE)
                    da_t, dp_t, ddt_t = gap_adjoint(a, half, unit, p, gap, s, mu_g, dP)
                    ddt_d = over_slots(tl.where(real, ddt_t, 0.0))
                    tl.store(ddt + (batch * T + t) * D + d, ddt_d, mask=has_d)
                dmu, ds = tl.where(real, dmu_back, dmu), tl.where(real, ds_back, ds)
                da += tl.where(real, da_t, 0.0)
                dp += tl.where(real, dp_t, 0.0)
                sum_db = over_slots(k_t[:, :, None] * db)
                lam_v_v = (lam_v_t * v_t)[None, None, :]
                dk_nd = lam_v_v * db + (2.0 * k_t)[:, :, None] * (lam_v_t[None, None, :] * dphi)
                tl.store(dv + (batch * T + t) * D + d, lam_v_t * sum_db, mask=has_d)
                tl.store(dlam_v + (batch * T + t) * D + d, over_slots(dlam_v_t), mask=has_d)
                slot = ((block * B + batch) * T + t) * N + n
                tl.store(dk + slot, tl.sum(dk_nd, axis=2), mask=has_n)
                tl.store(dq + slot, dq_n, mask=has_n)
            tl.debug_barrier()
        # Once per chunk, in float64: a sum over a long sequence needs more digits than one chunk.
        da_old = tl.load(dynamics + here_g, mask=has_g, other=0.0)
        dp_old = tl.load(dynamics + field + here_g, mask=has_g, other=0.0)
        tl.store(dynamics + here_g, da_old + da, mask=has_g)
        tl.store(dynamics + field + here_g, dp_old + dp, mask=has_g)
    if segment == 0:
        tl.store(dmean_0 + row * size + at, dmu, mask=has)
        tl.store(dvariance_0 + row * size_g + at_g, ds, mask=has_g)


@kernel
def adjoint_summary_kernel(
    q, k, v, lam_v, dt, mask, cu_seqlens,
    q_sb, q_st, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st, dt_sb, dt_st, dt_sd, mask_sb, mask_st,
    a_bar, p_bar, saved, dy, dy_var, dy_sb, dy_st, dy_var_sb, dy_var_st, maps, block_maps,
    T, N, G, D, chunks, blocks, segments, per_segment, stride, block_stride,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The adjoint map of one segment.

    cross and dmu_0 go into [2, R, segments, N, D], ``stride`` apart; gain and ds_0, which slots
    share, into [2, R, segments, G, D].
    """
    row, segment, block = locate(0, segments, blocks)
    batch, first, end, chunk_0 = span_of(row, T, cu_seqlens, CHUNK)
    c0, c1, _last = chunks_of(segment, per_segment, first, end, CHUNK)
    G = N if BLOCK_M == 1 else G  # one value, so that its offsets are computed once
    n, d, at, at_g, at_first = lanes_of(block, N, G, D, BLOCK_M, BLOCK_G, BLOCK_D)
    has_n, has_d, has = lanes_exist(n, d, N, D)
    has_g = blocks_exist(has)
    DTYPE: tl.constexpr = a_bar.dtype.element_ty
    size = tl.cast(N, tl.int64) * D
    GAPS: tl.constexpr = dt is not None
    a, p, half, _unit = dynamics_of(a_bar, p_bar, at_g, has_g, GAPS)
    zero, zero_g = tl.full((BLOCK_M, BLOCK_G, BLOCK_D), 0.0, DTYPE), tl.zeros_like(p)
    gain, cross, dmu_0, ds_0 = zero_g + 1.0, zero, zero, zero_g
    for c in range(c0, c1):
        mu = tl.load(saved + (chunk_0 + c) * size + at, mask=has, other=0.0)
        s = tl.load(saved + (chunks + chunk_0 + c) * size + at_first, mask=has_g, other=0.0)
        for t in range(first + c * CHUNK, tl.minimum(first + (c + 1) * CHUNK, end)):
            if token_is_real(mask, mask_sb, mask_st, batch, t, end):
                k_t, v_t, lam_v_t = observe(
                    k, v, lam_v, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st,
                    batch, t, n, d, has_n, has_d, DTYPE,
                )  # fmt: skip
                q_t = read(q, q_sb, q_st, batch, t, n, has_n, DTYPE)
                phi, b = token_evidence(k_t, v_t, lam_v_t)
                a_t, p_t = step_to(a, p, half, dt, dt_sb, dt_st, dt_sd, batch, t, d, has_d)
                e = b - phi * faded(a_t, mu, GAPS)
                s, mu, r = filter_step(a_t, p_t, phi, b, s, mu, GAPS)
                dmu, ds = zero, zero_g
                if dy is not None:
                    dy_t = read(dy, dy_sb, dy_st, batch, t, d, has_d, DTYPE)
                    dmu = q_t[:, :, None] * dy_t[None, None, :]
                if dy_var is not None:
                    dy_var_t = read(dy_var, dy_var_sb, dy_var_st, batch, t, d, has_d, DTYPE)
                    ds = squares(q_t)[:, :, None] * dy_var_t[None, None, :]
                gain, cross, dmu_0, ds_0 = adjoint_then(
                    a_t, r, e, dmu, ds, gain, cross, dmu_0, ds_0, GAPS
                )
    field, field_g = tl.cast(stride, tl.int64), tl.cast(block_stride, tl.int64)
    number = row * segments + segment
    out, out_g = maps + number * size + at, block_maps + number * G * D + at_g
    tl.store(out, cross, mask=has)
    tl.store(out + field, dmu_0, mask=has)
    tl.store(out_g, gain, mask=has_g)
    tl.store(out_g + field_g, ds_0, mask=has_g)


@kernel
def incoming_kernel(
    cu_seqlens, maps, block_maps, dmean, dvariance, dmean_ends, dvariance_ends,
    T, N, G, D, blocks, segments, per_segment, stride, block_stride,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Carry the final adjoint of a row back over its segments, [R, segments, *, D]."""
    row, _, block = locate(0, 1, blocks)
    _, first, end, _ = span_of(row, T, cu_seqlens, CHUNK)
    G = N if BLOCK_M == 1 else G  # one value, so that its offsets are computed once
    n, d, at, at_g, _first = lanes_of(block, N, G, D, BLOCK_M, BLOCK_G, BLOCK_D)
    _, _, has = lanes_exist(n, d, N, D)
    has_g = blocks_exist(has)
    size, size_g = tl.cast(N, tl.int64) * D, tl.cast(G, tl.int64) * D
    field, field_g = tl.cast(stride, tl.int64), tl.cast(block_stride, tl.int64)
    dmu = tl.load(dmean + row * size + at, mask=has, other=0.0)
    ds = tl.load(dvariance + row * size_g + at_g, mask=has_g, other=0.0)
    used = tl.maximum(tl.cdiv(tl.cdiv(end - first, CHUNK), per_segment), 1)
    for back in range(0, used):
        number = row * segments + used - 1 - back
        here, here_g = number * size + at, number * size_g + at_g
        tl.store(dmean_ends + here, dmu, mask=has)
        tl.store(dvariance_ends + here_g, ds, mask=has_g)
        cross = tl.load(maps + here, mask=has, other=0.0)
        dmu_0 = tl.load(maps + field + here, mask=has, other=0.0)
        gain = tl.load(block_maps + here_g, mask=has_g, other=0.0)
        ds_0 = tl.load(block_maps + field_g + here_g, mask=has_g, other=0.0)
        ds = gain * (gain * ds) + per_block(cross * dmu) + ds_0
        dmu = gain * dmu + dmu_0


class Upstream(NamedTuple):
    """Gradients with respect to y and y_var, with their strides, and to the final belief."""

    outputs: tuple[Tensor | None, Tensor | None]
    strides: tuple[int, ...]
    last: tuple[Tensor, Tensor]


@on_device
def backward(
    inputs: ScanInputs,
    checkpoints: Tensor,
    dy: Tensor | None,
    dy_var: Tensor | None,
    dmean: Tensor | None,
    dvariance: Tensor | None,
) -> ScanGrads:
    """Exact gradients of one scan; see ``EngineModule.backward``."""
    tokens = prepare(inputs)
    cut = schedule(inputs, BACKWARD_LANES, tokens.dtype)
    (B, T, _), (R, N, D), G = inputs.v.shape, inputs.mean_0.shape, inputs.a_bar.shape[0]
    like = tokens.state_0[0]
    upstream = _upstream(dy, dy_var, dmean, dvariance, tokens)
    saved = dense(checkpoints, tokens.dtype)
    if cut.segments == 1:
        incoming = upstream.last
    else:
        incoming = _incoming(inputs, tokens, upstream, cut, saved)
    dv, dlam_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[2:4])
    # Per block of channels, added up afterwards in a fixed order: no atomics.
    dk, dq = like.new_empty(2, cut.blocks, B, T, N)
    dynamics = like.new_zeros(2, R, cut.segments, G, D, dtype=torch.float64)
    first = torch.empty_like(like), torch.empty_like(tokens.state_0[1])
    ddt = None if inputs.dt is None else like.new_empty(B, T, D)
    path = _scratch(like, cut)
    for first_row in range(0, R, wave_rows(cut)):
        count = min(wave_rows(cut), R - first_row)
        adjoint_kernel[(count * cut.segments * cut.blocks,)](
            *tokens.arrays, *tokens.strides, *tokens.dynamics,
            saved, path, *upstream.outputs, *upstream.strides,
            *incoming, dq, dk, dv, dlam_v, ddt, dynamics, *first,
            first_row, B, T, N, G, D, inputs.chunks,
            cut.blocks, cut.segments, cut.per_segment, dynamics.stride(0),
            CHUNK, WINDOW, *cut.tile, **OPTIONS,
        )  # fmt: skip
    da_bar, dp_bar = (add_up(x.flatten(0, 1), inputs.a_bar) for x in dynamics)
    dmean_0, dvariance_0 = (x.to(inputs.compute_dtype) for x in first)
    dk, dq = add_up(dk, inputs.k), add_up(dq, inputs.q)
    if inputs.dt is not None and ddt is not None:
        da_bar = -da_bar / inputs.a_bar
        ddt = ddt if inputs.dt.shape[-1] == D else ddt.sum(-1, keepdim=True)
        ddt = ddt.to(inputs.dt.dtype)
    return ScanGrads(dq, dk, dv, dlam_v, da_bar, dp_bar, dmean_0, dvariance_0, ddt)


def _upstream(
    dy: Tensor | None,
    dy_var: Tensor | None,
    dmean: Tensor | None,
    dvariance: Tensor | None,
    tokens: Tokens,
) -> Upstream:
    outputs = tuple(None if x is None else rows(x) for x in (dy, dy_var))
    strides = [s for x in outputs for s in ((0, 0) if x is None else x.stride()[:2])]
    last = (
        torch.zeros_like(like) if x is None else dense(x, tokens.dtype)
        for x, like in zip((dmean, dvariance), tokens.state_0, strict=True)
    )
    return Upstream((outputs[0], outputs[1]), tuple(strides), (next(last), next(last)))


def _incoming(
    inputs: ScanInputs, tokens: Tokens, upstream: Upstream, cut: Schedule, saved: Tensor
) -> tuple[Tensor, Tensor]:
    """Adjoint that arrives at each segment, [R, segments, N, D] and [R, segments, G, D]."""
    T, like, G = inputs.v.shape[1], tokens.state_0[0], inputs.a_bar.shape[0]
    R, N, D = like.shape
    shapes = (R, cut.segments, N, D), (R, cut.segments, G, D)
    maps, block_maps = (like.new_empty(f, *x) for f, x in zip(MAP_FIELDS, shapes, strict=True))
    incoming = like.new_empty(shapes[0]), like.new_empty(shapes[1])
    strides = maps.stride(0), block_maps.stride(0)
    adjoint_summary_kernel[(R * cut.segments * cut.blocks,)](
        *tokens.arrays, *tokens.strides, *tokens.dynamics,
        saved, *upstream.outputs, *upstream.strides, maps, block_maps,
        T, N, G, D, inputs.chunks, cut.blocks, cut.segments, cut.per_segment, *strides,
        CHUNK, *cut.tile, **OPTIONS,
    )  # fmt: skip
    incoming_kernel[(R * cut.blocks,)](
        tokens.arrays[-1], maps, block_maps, *upstream.last, *incoming,
        T, N, G, D, cut.blocks, cut.segments, cut.per_segment, *strides,
        CHUNK, *cut.tile, **OPTIONS,
    )  # fmt: skip
    return incoming


def _scratch(like: Tensor, cut: Schedule) -> Tensor:
    """Memory for the beliefs of a chunk's windows and of a window's tokens, per program."""
    programs = min(len(like), wave_rows(cut)) * cut.segments * cut.blocks
    return like.new_empty(programs, 2 * (CHUNK // WINDOW + WINDOW), *cut.tile)


COLUMNS = 128
"""Columns that one program sums, four per thread."""


@kernel
def sum_kernel(partial, out, rows, columns, BLOCK: tl.constexpr):
    """Sum over the rows of [rows, columns], in order."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    has = column < columns
    total = tl.full((BLOCK,), 0.0, partial.dtype.element_ty)
    here = partial + column
    for _ in range(0, rows):
        total += tl.load(here, mask=has, other=0.0)
        here += columns
    tl.store(out + column, total, mask=has)


def add_up(partial: Tensor, like: Tensor) -> Tensor:
    """Sum over the first axis, in the shape and dtype of ``like``."""
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    columns = out.numel()
    if columns:
        grid = (ceil(columns, COLUMNS),)
        sum_kernel[grid](partial, out, len(partial), columns, COLUMNS, **OPTIONS)
    return out
