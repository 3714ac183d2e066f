"""The place of a program: its row, segment and channels, and how it reads tokens there.

Every offset is a 64-bit integer. Nothing is specialised on the values of sizes or on the alignment
of pointers: one compiled variant serves all shapes, and the order of sums depends on neither.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from kalman_attention.ops.triton.lane import over_gap, reciprocal, seen

SIZES = (
    *("B", "T", "N", "G", "D", "rows", "columns", "chunks", "blocks", "segments", "per_segment"),
    *("stride", "block_stride", "first_row"),
)
"""Integer arguments other than strides, which end in _sb (row), _st (token) or _sd (channel)."""


def kernel(function: Callable[..., None]) -> Any:
    """``triton.jit`` for an entry point, specialised on dtypes and constexprs only."""
    # Integers are always 64 bits wide. By default their width depends on their values, and the
    # 32-bit variants need more registers, because every use has to widen them first.
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.annotation is not tl.constexpr]
    integers = [name for name in names if name in SIZES or name[-3:] in ("_sb", "_st", "_sd")]
    function.__annotations__.update(dict.fromkeys(integers, tl.int64))
    return triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)


@triton.jit
def locate(first_row, segments, blocks):
    """Row, segment and channel block of this program; the blocks of a segment are adjacent."""
    number = tl.program_id(0).to(tl.int64)
    return first_row + number // blocks // segments, number // blocks % segments, number % blocks


@triton.jit
def span_of(row, T, cu_seqlens, CHUNK: tl.constexpr):
    """Batch row, first token, one past the last token and first checkpoint of a row."""
    # row * 0 instead of 0: both branches must return values of the same type.
    if cu_seqlens is None:
        return row, row * 0, row * 0 + T, row * tl.cdiv(T, CHUNK)
    else:
        first = tl.load(cu_seqlens + row)
        return row * 0, first, tl.load(cu_seqlens + row + 1), first // CHUNK + row


@triton.jit
def chunks_of(segment, per_segment, first, end, CHUNK: tl.constexpr):
    """First and one past the last chunk of a segment, and whether the row ends with it."""
    every = tl.cdiv(end - first, CHUNK)
    c0 = tl.minimum(segment * per_segment, every)
    c1 = tl.minimum(c0 + per_segment, every)
    return c0, c1, (c1 == every) & ((c0 < c1) | (segment == 0))


@triton.jit
def lanes_of(block, N, G, D, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """Slots and channels of a tile, and the offsets of its lanes and blocks in memory.

    Returns:
        n: slots, ``[M, G]``; N for places beyond the end of a block.
        d: channels, ``[D]``.
        at: offsets of the lanes in an ``[N, D]`` array, ``[M, G, D]``.
        at_g: offsets of the blocks in a ``[G, D]`` array, ``[1, G, D]``.
        at_first: offsets of their first slots in an ``[N, D]`` array.
    """
    g, d = tl.arange(0, BLOCK_G)[None, :], block * BLOCK_D + tl.arange(0, BLOCK_D)
    row, column = (d * 0 + D)[None, None, :], d[None, None, :]
    at_g = g[:, :, None] * row + column
    if BLOCK_M == 1:
        return g, d, at_g, at_g, at_g
    else:
        m, j = N // G, tl.arange(0, BLOCK_M)[:, None]
        n = tl.where(j < m, g * m + j, N)
        return n, d, n[:, :, None] * row + column, at_g, (g * m)[:, :, None] * row + column


@triton.jit
def lanes_exist(n, d, N, D):
    """Masks of the slots, channels and lanes of a tile that exist."""
    has_n, has_d = n < N, d < D
    return has_n, has_d, has_n[:, :, None] & has_d[None, None, :]


@triton.jit
def blocks_exist(has):
    """Mask of the blocks of a tile that exist: those with at least one slot."""
    if has.shape[0] == 1:
        return has
    else:
        return tl.max(has.to(tl.int32), axis=0, keep_dims=True) != 0


@triton.jit
def token_is_real(mask, mask_sb, mask_st, row, t, end):
    """Whether t is a real token: before the end and not padding."""
    if mask is None:
        return t < end
    else:
        return tl.load(mask + row * mask_sb + t * mask_st, mask=t < end, other=0) != 0


@triton.jit
def read(x, x_sb, x_st, row, t, which, keep, DTYPE: tl.constexpr):
    """Entries ``which`` of token t in the arithmetic dtype; 0 where ``keep`` is False."""
    return tl.load(x + row * x_sb + t * x_st + which, mask=keep, other=0.0).to(DTYPE)


@triton.jit
def observe(
    k, v, lam_v, k_sb, k_st, v_sb, v_st, lam_v_sb, lam_v_st,
    row, t, n, d, keep_n, keep_d, DTYPE: tl.constexpr,
):  # fmt: skip
    """Key, value and precision of token t, [M, G], [D] and [D]; 0 where masked."""
    k_t = read(k, k_sb, k_st, row, t, n, keep_n, DTYPE)
    v_t = read(v, v_sb, v_st, row, t, d, keep_d, DTYPE)
    lam_v_t = read(lam_v, lam_v_sb, lam_v_st, row, t, d, keep_d, DTYPE)
    return k_t, seen(v_t, lam_v_t), lam_v_t


@triton.jit
def squares(k):
    """|k|^2 of every block, ``[1, G]``."""
    if k.shape[0] == 1:
        return k * k
    else:
        return tl.sum(k * k, axis=0, keep_dims=True)


@triton.jit
def token_evidence(k, v, lam_v):
    """``filtering.blocks.block_evidence``: phi, ``[1, G, D]``, and b, ``[M, G, D]``."""
    phi = squares(k)[:, :, None] * lam_v[None, None, :]
    return phi, k[:, :, None] * (lam_v * v)[None, None, :]


@triton.jit
def dynamics_of(a_bar, p_bar, place, has_g, GAPS: tl.constexpr):
    """Decay and noise of every step; with gaps L, p_bar / h(1), 1 / (2 L) and 1 / h(1)."""
    a = tl.load(a_bar + place, mask=has_g, other=0.0)
    p = tl.load(p_bar + place, mask=has_g, other=0.0)
    if GAPS:
        half = reciprocal(tl.where(a > 0.0, 2.0 * a, 1.0))  # unused without decay
        _u, h = over_gap(a, half, tl.full(a.shape, 1.0, a.dtype))
        unit = reciprocal(h)
        return a, p * unit, half, unit
    else:
        return a, p, a, a


@triton.jit
def gap_before(dt, dt_sb, dt_st, dt_sd, row, t, d, keep_d, DTYPE: tl.constexpr):
    """Time before token t, ``[1, 1, D]``; 0 at padding."""
    gap = tl.load(dt + row * dt_sb + t * dt_st + d * dt_sd, mask=keep_d, other=0.0).to(DTYPE)
    return gap[None, None, :]


@triton.jit
def step_to(a, p, half, dt, dt_sb, dt_st, dt_sd, row, t, d, keep_d):
    """Decay, in the form that ``faded`` takes, and noise variance of the step to token t."""
    if dt is None:
        return a, p
    else:
        gap = gap_before(dt, dt_sb, dt_st, dt_sd, row, t, d, keep_d, p.dtype)
        w, h = over_gap(a, half, gap)
        return w, p * h
