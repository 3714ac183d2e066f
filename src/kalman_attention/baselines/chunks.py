"""Sequences cut into chunks: what all mixers with a matrix as their state share.

Letters of the chunked forms, per head: L tokens per chunk, n chunks, keys of K and values of V
channels, a state of K x V numbers. Heads come before time: ``[B, H, n, L, ...]``.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


def split_heads(x: Tensor, widths: list[int], heads: int) -> list[Tensor]:
    """Cut the last axis into parts of these widths, and each part into heads."""
    parts = torch.split(x, widths, -1)
    return [part.reshape(*x.shape[:-1], heads, part.shape[-1] // heads) for part in parts]


def chunk_size(T: int, K: int, V: int) -> int:
    """Tokens per chunk: a power of 2, and no larger than it takes to hold T.

    Per token, weights inside a chunk cost its length L, states between chunks K V / L: half of
    sqrt(K V) was fastest for all mixers and head sizes, within 16 to 64.
    """
    balanced = 1 << max(math.isqrt(K * V) // 2, 1).bit_length() - 1
    return min(max(16, min(balanced, 64)), 1 << max(T - 1, 0).bit_length())


def to_chunks(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """Tokens ``[B, T, H, ...]`` to ``[B, H, n, size, ...]``; places without a token get ``fill``.

    There is always a chunk, so that no tokens at all are nothing special.
    """
    T = x.shape[1]
    n = max(1, -(-T // size))
    padding = [0, 0] * (x.dim() - 2) + [0, n * size - T]
    x = nn.functional.pad(x, padding, value=fill) if n * size > T else x
    return x.reshape(x.shape[0], n, size, *x.shape[2:]).movedim(3, 1)


def from_chunks(x: Tensor, T: int) -> Tensor:
    """The way back: ``[B, H, n, L, V]`` to ``[B, T, H, V]``."""
    return x.flatten(2, 3)[:, :, :T].transpose(1, 2)


def segment_sums(x: Tensor) -> Tensor:
    """Sums over segments, ``[..., L]`` to ``[..., L, L]``: x_{j + 1} + ... + x_i at (i, j).

    0 on the diagonal and -inf above it, ready for exp. Each segment is summed by itself: a
    difference of two long sums would lose the digits of a short one.
    """
    L = x.shape[-1]
    later = torch.ones(L, L, dtype=torch.bool, device=x.device)
    rows = x.unsqueeze(-1).expand(*x.shape, L).masked_fill(~later.tril(-1), 0.0)
    return rows.cumsum(-2).masked_fill(~later.tril(), -torch.inf)


def carry(
    factor: Tensor,
    update: Tensor,
    state: Tensor,
    times: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> tuple[Tensor, Tensor]:
    """Run state <- factor times state + update over the chunks.

    Args:
        factor: ``[B, H, n, ...]``, what ``times`` takes beside a state.
        update: ``[B, H, n, K, V]``.
        state: before the first chunk, ``[B, H, K, V]``.
        times: the product.

    Returns:
        The states before each chunk ``[B, H, n, K, V]``, and the last one.
    """
    before = []
    for one, term in zip(factor.unbind(2), update.unbind(2), strict=True):
        before.append(state)
        state = term + times(one, state)
    return torch.stack(before, 2), state
