"""Finite groups as permutations, with their multiplication tables.

Elements are in lexicographic order of their one-line form, which puts the identity first: in A5,
element 0 is 12345, element 1 is 12453, element 59 is 54321. A product a b applies b, then a.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kalman_attention._text import unknown

Permutation = tuple[int, ...]
"""The image of each point, points counted from 0."""


@dataclass(frozen=True)
class Group:
    """A finite group.

    Attributes:
        elements: the permutations, in lexicographic order.
    """

    elements: tuple[Permutation, ...]

    @functools.cached_property
    def table(self) -> Tensor:
        """Multiplication table: ``table[a, b]`` is the index of a b, ``[n, n]`` int64."""
        number = {element: i for i, element in enumerate(self.elements)}
        rows = [[number[compose(a, b)] for b in self.elements] for a in self.elements]
        return torch.tensor(rows)

    def prefix_products(self, word: Tensor) -> Tensor:
        """Running products of each row, ``[n, T]`` to ``[n, T]``."""
        product = torch.zeros(len(word), dtype=torch.int64)
        found = torch.empty_like(word)
        for t, element in enumerate(word.unbind(1)):
            product = self.table[product, element]
            found[:, t] = product
        return found


def compose(a: Permutation, b: Permutation) -> Permutation:
    """The permutation that applies b, then a."""
    return tuple(a[point] for point in b)


def symmetric(points: int) -> list[Permutation]:
    """All permutations."""
    return list(itertools.permutations(range(points)))


def alternating(points: int) -> list[Permutation]:
    """The even permutations."""
    return [p for p in symmetric(points) if not _inversions(p) % 2]


def cyclic(points: int) -> list[Permutation]:
    """The rotations; rotation by r is element r."""
    return [tuple((i + r) % points for i in range(points)) for r in range(points)]


def direct_product(a: Iterable[Permutation], b: Iterable[Permutation]) -> list[Permutation]:
    """Pairs of elements, as permutations of the union of their points."""
    return [(*x, *(point + len(x) for point in y)) for x, y in itertools.product(list(a), list(b))]


def _inversions(p: Permutation) -> int:
    return sum(x > y for x, y in itertools.combinations(p, 2))


_BUILD: dict[str, Callable[[], list[Permutation]]] = {
    "z2": lambda: cyclic(2),
    "a5": lambda: alternating(5),
    "a4xz5": lambda: direct_product(alternating(4), cyclic(5)),
    "z60": lambda: cyclic(60),
    "s5": lambda: symmetric(5),
}
GROUPS = tuple(_BUILD)
"""Names that ``group`` knows."""


@functools.cache
def group(name: str) -> Group:
    """A group by name.

    A5 has 60 elements and is not solvable; A4 x Z5 (solvable) and Z60 (commutative) have
    60 as well. S5 has 120 and contains A5. Z2 is parity.
    """
    if name not in _BUILD:
        raise ValueError(unknown("group", name, GROUPS))
    return Group(tuple(_BUILD[name]()))
