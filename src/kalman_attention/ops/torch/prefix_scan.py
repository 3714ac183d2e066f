"""How to scan, in plain torch operations. The maps to combine come from ``filtering``.

A scan takes maps m_1 ... m_T along ``dim`` of every field of a named tuple and returns the
prefixes m_t o ... o m_1. ``combine(later, earlier)`` must be associative and elementwise in time.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Maps = TypeVar("Maps", bound=tuple[Any, ...])  # a NamedTuple of equally shaped tensors
Combine = Callable[[Maps, Maps], Maps]


def prefix_scan(combine: Combine[Maps], maps: Maps, dim: int = 1) -> Maps:
    """Inclusive prefixes by pairing neighbours: O(T) combinations in O(log T) rounds.

    Combine each odd element with the even one before it, scan the pairs (half as many), then
    combine every even element with the prefix that ends right before it.
    """
    T = maps[0].shape[dim]
    if T < 2:
        return maps
    even, odd = _take(maps, dim, 0), _take(maps, dim, 1)
    pairs = combine(odd, _narrow(even, dim, 0, T // 2))
    odd_prefixes = prefix_scan(combine, pairs, dim)
    later_even = _narrow(even, dim, 1, (T - 1) // 2)
    even_prefixes = combine(later_even, _narrow(odd_prefixes, dim, 0, (T - 1) // 2))
    return _like(
        maps,
        [
            _interleave(torch.cat([first.narrow(dim, 0, 1), rest], dim), odds, dim)
            for first, rest, odds in zip(even, even_prefixes, odd_prefixes, strict=True)
        ],
    )


def torch_scan(combine: Combine[Maps], maps: Maps, dim: int = 1) -> Maps:
    """The same prefixes by torch's own ``associative_scan``, a private API of torch.

    Only used for comparison with the paper.
    """
    from torch._higher_order_ops import associative_scan

    def combine_fields(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...]) -> tuple[Any, ...]:
        return tuple(combine(_like(maps, later), _like(maps, earlier)))

    fields = tuple(maps)
    if fields[0].shape[dim] < 2:
        return maps
    return _like(maps, associative_scan(combine_fields, fields, dim, combine_mode="generic"))


def _like(maps: Maps, fields: Any) -> Maps:
    return type(maps)(*fields)


def _take(maps: Maps, dim: int, start: int) -> Maps:
    T = maps[0].shape[dim]
    every_other = (slice(None),) * dim + (slice(start, T, 2),)
    return _like(maps, (x[every_other] for x in maps))


def _narrow(maps: Maps, dim: int, start: int, length: int) -> Maps:
    return _like(maps, (x.narrow(dim, start, length) for x in maps))


def _interleave(even: Tensor, odd: Tensor, dim: int) -> Tensor:
    shape = list(even.shape)
    shape[dim] = even.shape[dim] + odd.shape[dim]
    out = even.new_empty(shape)
    before = (slice(None),) * dim
    out[(*before, slice(0, None, 2))] = even
    out[(*before, slice(1, None, 2))] = odd
    return out
