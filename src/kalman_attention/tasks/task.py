"""What a task is: frozen options, and sequences that depend on nothing but options and a seed.

Rows are drawn in blocks, each from a generator of its own, so the first rows of a set are the same
however many are asked for. The seed of a block says in its two top bits which stream it belongs to
(train, test, shared, fresh) and is otherwise a hash of task, seed and block: blocks of different
streams never start from the same point.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

IGNORE = -100
"""Target of a position that is not scored."""

Split = Literal["train", "test"]

_STREAMS = ("train", "test", "shared", "fresh")
_ROWS = 1024
"""Rows per block."""


class Sequences(NamedTuple):
    """Rows of a task.

    Attributes:
        inputs: tokens, ``[n, T]`` int64.
        targets: the token to predict at each position, or ``IGNORE``, ``[n, T]`` int64.
    """

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Options that all tasks have. A task is a subclass with published values as defaults.

    Attributes:
        seq_len: tokens of one problem; the model may see one less (``input_len``).
        train_size: number of training sequences.
        test_size: number of test sequences.
    """

    seq_len: int
    train_size: int = 12_800
    test_size: int = 1_280

    scored: ClassVar[str]
    """Which targets count in the test set, in words."""
    SHORT: ClassVar[dict[str, Any]]
    """Options of a version that fits on a line."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of a guess among the answers that are possible."""

    @property
    def input_len(self) -> int:
        """Length of a row of inputs."""
        return self.seq_len

    @abstractmethod
    def token_names(self) -> list[str]:
        """A readable name for every token."""

    @abstractmethod
    def _draw(self, split: Split, count: int, generator: torch.Generator, seed: int) -> Sequences:
        """Independent rows; ``seed`` is that of the whole set, for what all its rows share."""

    def size(self, split: Split) -> int:
        """Number of sequences in a split."""
        return self.train_size if check_split(split) == "train" else self.test_size

    def generate(self, split: Split, *, seed: int = 0, count: int | None = None) -> Sequences:
        """The training or the test set of a seed.

        Args:
            split: ``"train"`` or ``"test"``; both draw from streams of their own.
            seed: which set; the same seed gives the same set.
            count: number of sequences, the first ones (or more of them); None for all.

        Returns:
            ``Sequences(inputs, targets)``, ``[count, input_len]`` each.
        """
        rows = self.size(split) if count is None else count
        if rows < 0:
            raise ValueError(f"count must be at least 0, got {rows}.")
        return self._blocks(check_split(split), split, seed, rows)

    def sample(
        self, count: int, generator: torch.Generator, *, split: Split = "train", seed: int = 0
    ) -> Sequences:
        """Rows drawn with a generator of the caller.

        Args:
            count: rows.
            generator: where the randomness comes from.
            split: whether targets are those of training or of test.
            seed: of what all rows of a set share, such as the map of memorization.
        """
        check_split(split)
        return self._draw(split, count, generator, seed)

    def stream(
        self, batch_size: int, *, split: Split = "train", seed: int = 0
    ) -> Iterator[Sequences]:
        """Fresh batches without end, in the form of ``split``, from a stream of their own.

        Args:
            batch_size: rows of a batch.
            split: whether targets are those of training or of test.
            seed: which stream.

        Yields:
            ``Sequences`` of ``batch_size`` rows.
        """
        check_split(split)
        block = 0
        while True:
            yield self._draw(split, batch_size, self._generator("fresh", seed, block), seed)
            block += 1

    def _blocks(self, stream: str, split: Split, seed: int, count: int) -> Sequences:
        parts = [
            self._draw(split, _ROWS, self._generator(stream, seed, block), seed)
            for block in range(max(1, -(-count // _ROWS)))
        ]
        inputs, targets = (torch.cat(column)[:count] for column in zip(*parts, strict=True))
        return Sequences(inputs, targets)

    def _generator(self, stream: str, seed: int, block: int = 0) -> torch.Generator:
        text = f"{type(self).__name__}/{seed}/{block}/{stream}"
        digest = hashlib.sha256(text.encode()).digest()
        # 32 bits are all that torch's generator takes from a seed.
        start = _STREAMS.index(stream) << 30 | int.from_bytes(digest[:4], "big") >> 2
        return torch.Generator().manual_seed(start)


def leakage(train: Tensor, test: Tensor) -> float:
    """Share of test inputs that also occur, whole, among the training inputs.

    Args:
        train: training inputs, ``[n, T]``.
        test: test inputs, ``[m, T]``.

    Returns:
        Between 0 and 1; 0 for no test inputs.
    """
    if len(test) == 0 or train.shape[1] != test.shape[1]:
        return 0.0
    known, asked = row_codes(train), row_codes(test)
    found = 0
    for i in torch.isin(asked, known).nonzero().flatten().tolist():
        same = train[known == asked[i]]
        found += bool((same == test[i]).all(1).any())
    return found / len(test)


def row_codes(rows: Tensor, base: int = 6_364_136_223_846_793_005) -> Tensor:
    """One number per row of ``[n, T]``; equal rows have equal numbers.

    The number is the row read as digits in ``base``, modulo 2^64. With a base above all digits and
    few enough of them it is exact; the default base, large and odd, makes it a good hash.
    """
    codes = torch.zeros(len(rows), dtype=torch.int64)
    for column in rows.unbind(1):
        codes = codes * base + column
    return codes


def uniform(shape: tuple[int, ...], high: int, generator: torch.Generator) -> Tensor:
    """Integers from 0 to ``high`` - 1, each as likely as the other."""
    return torch.randint(high, shape, generator=generator)


def next_tokens(tokens: Tensor) -> Sequences:
    """Inputs, and the token after each as its target."""
    return Sequences(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def at_least(task: object, **bounds: int) -> None:
    """Raise unless each named option of ``task`` is at least its bound."""
    for name, least in bounds.items():
        if getattr(task, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(task, name)}.")


def check_split(split: str) -> str:
    """The split, or an error that says which there are."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    return split
