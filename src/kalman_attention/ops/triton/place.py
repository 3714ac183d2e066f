"""Where a program stands: its row, segment and channels, and how it reads tokens there.

Every offset is a 64-bit integer. Nothing is specialised on the values of sizes or on the alignment
of pointers, so one compiled variant serves all shapes and the order of no sum depends on either.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from kalman_attention.ops.triton.lane import seen

SIZES = (
    *("B", "T", "N", "D", "rows", "columns", "chunks", "blocks", "segments", "per_segment"),
    *("stride", "first_row"),
)
"""Integer arguments, besides the strides of rows and tokens, which end in ``_sb`` and ``_st``."""


def kernel(function: Callable[..., None]) -> Any:
    """``triton.jit`` for an entry point: compiled per dtype and constexpr, for nothing else.

    Integers are always 64 bits wide. By default it would depend on their values, and the 32-bit
    variants need more registers, because every use widens them first.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.annotation is not tl.constexpr]
    integers = [name for name in names if name in SIZES or name[-3:] in ("_sb", "_st")]
    function.__annotations__.update(dict.fromkeys(integers, tl.int64))
    return triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)


@triton.jit
def locate(first_row, segments, blocks):
    """Row, segment and channel block of this program; blocks of a segment are neighbours."""
    number = tl.program_id(0).to(tl.int64)
    return first_row + number // blocks // segments, number // blocks % segments, number % blocks


@triton.jit
def span_of(row, T, cu_seqlens, CHUNK: tl.constexpr):
    """Batch row, first token, one past the last token and first checkpoint of a row."""
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
def lanes_of(block, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Slots, channels, offsets into an [N, D] array, and which of each exist."""
    n = tl.arange(0, BLOCK_N)
    d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    return n, d, n[:, None] * (d * 0 + D)[None, :] + d[None, :], n < N, d < D


@triton.jit
def token_is_real(mask, mask_sb, mask_st, row, t, end):
    """Whether there is a token at t: before the end and not padding."""
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
    """Key, value and precision of token t, [N], [D] and [D]; 0 where there is none."""
    k_t = read(k, k_sb, k_st, row, t, n, keep_n, DTYPE)
    v_t = read(v, v_sb, v_st, row, t, d, keep_d, DTYPE)
    lam_v_t = read(lam_v, lam_v_sb, lam_v_st, row, t, d, keep_d, DTYPE)
    return k_t, seen(v_t, lam_v_t), lam_v_t


@triton.jit
def token_evidence(k, v, lam_v):
    """``filtering.evidence.token_evidence`` of one token: phi and b, [N, D]."""
    phi = (k * k)[:, None] * lam_v[None, :]
    return phi, k[:, None] * (lam_v * v)[None, :]
