"""State tracking: multiply the elements of a group as they come (the word problem).

::

    input   BOS  g1  g3  g7 g59
    target  BOS  g1  g6  g3 g46      the product of all elements so far

In A5, the even permutations of five things, no shortcut is known: a model of fixed depth has to
carry the product along. All sequences of a set differ, and those of train and test too.
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
"""Tokens after those of the elements; the published vocabulary has all of them."""

_ENUMERABLE = 2**22
"""Problems that are numbered and shuffled rather than drawn until enough are different."""
_DRAWN = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Permutations(Task):
    """Running products in a finite group.

    Attributes:
        group: ``"z2"``, ``"z60"``, ``"a4xz5"``, ``"a5"`` or ``"s5"``.
        seq_len: elements to multiply.
        bos: begin inputs and targets with BOS, which is scored like any other target.
        pairs: add all problems of length two to the training set, padded, if the others are longer.
        score_padding: let padding have PAD as its target, as published, and not ``IGNORE``.
        train_size: training problems of full length, if there are as many.
        test_size: test problems; a fifth of all problems at most.
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
        group(self.group)  # or an error that names those there are

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
        """Number of sequences in a split, where few problems exist fewer than asked for."""
        problems: int = self.order**self.seq_len
        test = min(self.test_size, problems // 5)
        if check_split(split) == "test":
            return test
        return min(self.train_size, problems - test) + self.num_pairs

    def generate(self, split: Split, *, seed: int = 0, count: int | None = None) -> Sequences:
        """The training or the test set of a seed; problems of length two stand last.

        Args:
            split: ``"train"`` or ``"test"``; no problem of full length is in both.
            seed: which set; the same seed gives the same set.
            count: number of sequences, the first ones; None for all.

        Returns:
            ``Sequences(inputs, targets)``, ``[count, input_len]`` each.
        """
        size = self.size(split)
        count = size if count is None else count
        if not 0 <= count <= size:
            raise ValueError(
                f"count must be between 0 and {size}, the sequences of this {split} set, got "
                f"{count}. Set {split}_size for a larger set, or take fresh ones from stream()."
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
        """All problems of length two, padded on the right; none if the set has none."""
        word = _digits(torch.arange(self.num_pairs), self.order, 2)
        inputs, targets = self._rows(word)
        room, filler = (0, self.seq_len - 2), self.token("PAD")
        ignored = filler if self.score_padding else IGNORE
        return Sequences(pad(inputs, room, value=filler), pad(targets, room, value=ignored))

    def _problems(self, count: int, seed: int) -> Tensor:
        """The first ``count`` of an endless list of different problems, ``[count, seq_len]``.

        The list is random, so its head may serve as the test set and what follows as training.
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
    """Numbers ``[n]`` written in a base, most significant digit first, ``[n, length]``."""
    places = base ** torch.arange(length - 1, -1, -1)
    return numbers.unsqueeze(1) // places % base


def _without_repeats(rows: Tensor, base: int) -> Tensor:
    """The rows without those that came before.

    Rows too long for an exact number go by a hash: one in 10^13 pairs that differ may be taken for
    equal and lose a row, but equal rows never both stay.
    """
    exact = base ** rows.shape[1] < 2**63
    codes = row_codes(rows, base) if exact else row_codes(rows)
    ordered, order = codes.sort(stable=True)
    keep = torch.ones(len(rows), dtype=torch.bool)
    keep[order[1:][ordered[1:] == ordered[:-1]]] = False
    return rows[keep]


@dataclass(frozen=True, kw_only=True)
class A5(Permutations):
    """``Permutations`` in A5: not solvable, the hard one."""


@dataclass(frozen=True, kw_only=True)
class Parity(Permutations):
    """``Permutations`` in Z2: whether the ones so far are odd in number."""

    group: str = "z2"


@dataclass(frozen=True, kw_only=True)
class A4xZ5(Permutations):
    """``Permutations`` in A4 x Z5: solvable, not commutative."""

    group: str = "a4xz5"


@dataclass(frozen=True, kw_only=True)
class Z60(Permutations):
    """``Permutations`` in Z60: commutative."""

    group: str = "z60"


@dataclass(frozen=True, kw_only=True)
class S5(Permutations):
    """``Permutations`` in S5: all permutations of five things."""

    group: str = "s5"
