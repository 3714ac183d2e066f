"""State tracking: the running product of elements of a group (the word problem).

::

    input   BOS  g1  g3  g7 g59
    target  BOS  g1  g6  g3 g46      the product of all elements so far

In A5, the even permutations of five objects, no shortcut is known: a model of fixed depth has to
carry the product along. All sequences of a set are distinct, and train and test sets are disjoint.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kalman_attention.tasks.groups import Group, group
from kalman_attention.tasks.task import (
    IGNORE,
    Sequences,
    Split,
    Task,
    at_least,
    check_split,
    row_codes,
    uniform,
)

SPECIAL = ("PAD", "BOS", "UNK", "EOS", "SEP", "CLS", "MASK")
"""Special tokens, after those of the elements; all are part of the published vocabulary."""

# A shuffled list of 2^22 numbers takes 32 MiB. Beyond, repeats are rare, and problems are drawn at
# random until enough of them are distinct.
_ENUMERABLE = 2**22
"""Largest number of problems that are enumerated and shuffled."""

# The first problems must not depend on how many are requested, so they come in blocks, each with a
# random seed of its own.
_DRAWN = 1 << 16
"""Problems per block of random draws."""


@dataclass(frozen=True, kw_only=True)
class Permutations(Task):
    """Running products in a finite group.

    Attributes:
        group: ``"z2"``, ``"z60"``, ``"a4xz5"``, ``"a5"`` or ``"s5"``.
        seq_len: elements to multiply.
        bos: begin inputs and targets with BOS, which counts like any other target.
        pairs: also put all problems of length two, padded, into the training set.
        score_padding: use PAD as the target of padding, as published, instead of ``IGNORE``.
        train_size: training problems of full length, if enough exist.
        test_size: test problems; at most a fifth of all problems.
    """

    group: str = "a5"
    seq_len: int = 20
    bos: bool = True
    pairs: bool = True
    score_padding: bool = True
    train_size: int = 800_000
    test_size: int = 200_000

    scored: ClassVar[str] = "every running product (and BOS)"
    SHORT: ClassVar[dict[str, Any]] = {"seq_len": 6, "train_size": 100, "test_size": 100}

    def __post_init__(self) -> None:
        at_least(self, seq_len=1)
        group(self.group)  # raises an error that lists the known groups

    @property
    def elements(self) -> Group:
        """The group."""
        return group(self.group)

    @property
    def order(self) -> int:
        """Number of elements, tokens 0 (the identity) to order - 1."""
        return len(self.elements.elements)

    @property
    def vocab_size(self) -> int:
        """Elements and special tokens."""
        return self.order + len(SPECIAL)

    @property
    def input_len(self) -> int:
        """Length of a row of inputs."""
        return self.seq_len + self.bos

    @property
    def chance(self) -> float:
        """One element among all, at one position."""
        return 1.0 / self.order

    def token_names(self) -> list[str]:
        """g0 g1 ... and the special tokens by name."""
        return [*(f"g{i}" for i in range(self.order)), *SPECIAL]

    def token(self, name: str) -> int:
        """Number of a special token."""
        return self.order + SPECIAL.index(name)

    @property
    def num_pairs(self) -> int:
        """Problems of length two in the training set."""
        return self.order**2 if self.pairs and self.seq_len > 2 else 0

    def size(self, split: Split) -> int:
        """Number of sequences in a split; limited by the number of problems that exist."""
        problems: int = self.order**self.seq_len
        test = min(self.test_size, problems // 5)
        if check_split(split) == "test":
            return test
        return min(self.train_size, problems - test) + self.num_pairs

    def generate(self, split: Split, *, seed: int = 0, count: int | None = None) -> Sequences:
        """The training or test set of a random seed; problems of length two come last.

        Args:
            split: ``"train"`` or ``"test"``; no problem of full length is in both.
            seed: random seed; the same seed gives the same set.
            count: return the first ``count`` sequences; None for all.

        Returns:
            ``Sequences(inputs, targets)``, ``[count, input_len]`` each.
        """
        size = self.size(split)
        count = size if count is None else count
        if not 0 <= count <= size:
            raise ValueError(
                f"count must be between 0 and {size}, the size of this {split} set, got {count}. "
                f"Set {split}_size for a larger set, or take new sequences from stream()."
            )
        if split == "test":
            return self._rows(self._problems(count, seed))
        full = min(count, size - self.num_pairs)
        test = self.size("test")
        rows = self._rows(self._problems(test + full, seed)[test:])
        short = self._short_rows()
        return Sequences(*(torch.cat(both)[:count] for both in zip(rows, short, strict=True)))

    def _draw(self, split: Split, count: int, generator: torch.Generator, seed: int) -> Sequences:
        return self._rows(uniform((count, self.seq_len), self.order, generator))

    def _rows(self, word: Tensor) -> Sequences:
        """Inputs and targets of problems ``[n, k]``."""
        products = self.elements.prefix_products(word)
        if not self.bos:
            return Sequences(word, products)
        bos = self.token("BOS")
        return Sequences(pad(word, (1, 0), value=bos), pad(products, (1, 0), value=bos))

    def _short_rows(self) -> Sequences:
        """All problems of length two, padded on the right; empty if the set has none."""
        word = _digits(torch.arange(self.num_pairs), self.order, 2)
        inputs, targets = self._rows(word)
        room, filler = (0, self.seq_len - 2), self.token("PAD")
        ignored = filler if self.score_padding else IGNORE
        return Sequences(pad(inputs, room, value=filler), pad(targets, room, value=ignored))

    def _problems(self, count: int, seed: int) -> Tensor:
        """The first ``count`` items of a random list of distinct problems, ``[count, seq_len]``.

        Its head serves as the test set and the rest as the training set.
        """
        problems = self.order**self.seq_len
        if problems <= _ENUMERABLE:
            order = torch.randperm(problems, generator=self._generator("shared", seed))
            return _digits(order[:count], self.order, self.seq_len)
        found = torch.empty(0, self.seq_len, dtype=torch.int64)
        block = 0
        while len(found) < count:
            missing = -(-(count - len(found)) // _DRAWN)
            parts = [found]
            for _ in range(missing):
                generator = self._generator("shared", seed, block)
                parts.append(uniform((_DRAWN, self.seq_len), self.order, generator))
                block += 1
            found = _without_repeats(torch.cat(parts), self.order)
        return found[:count]


def _digits(numbers: Tensor, base: int, length: int) -> Tensor:
    """Digits of numbers ``[n]`` in a base, most significant first, ``[n, length]``."""
    places = base ** torch.arange(length - 1, -1, -1)
    return numbers.unsqueeze(1) // places % base


def _without_repeats(rows: Tensor, base: int) -> Tensor:
    """Remove rows that occurred before."""
    # Rows too long for an exact number are compared by a hash: one in 10^13 pairs of distinct rows
    # may collide and lose a row, but equal rows are never both kept.
    exact = base ** rows.shape[1] < 2**63
    codes = row_codes(rows, base) if exact else row_codes(rows)
    ordered, order = codes.sort(stable=True)
    keep = torch.ones(len(rows), dtype=torch.bool)
    keep[order[1:][ordered[1:] == ordered[:-1]]] = False
    return rows[keep]


@dataclass(frozen=True, kw_only=True)
class A5(Permutations):
    """``Permutations`` in A5, which is not solvable: the hard case."""


@dataclass(frozen=True, kw_only=True)
class Parity(Permutations):
    """``Permutations`` in Z2: whether the number of ones so far is odd."""

    group: str = "z2"


@dataclass(frozen=True, kw_only=True)
class A4xZ5(Permutations):
    """``Permutations`` in A4 x Z5, which is solvable but not commutative."""

    group: str = "a4xz5"


@dataclass(frozen=True, kw_only=True)
class Z60(Permutations):
    """``Permutations`` in Z60, which is commutative."""

    group: str = "z60"


@dataclass(frozen=True, kw_only=True)
class S5(Permutations):
    """``Permutations`` in S5: all permutations of five objects."""

    group: str = "s5"
