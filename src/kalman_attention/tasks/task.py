"""The interface of a task: frozen options, and sequences that depend only on options and a seed.

Rows are drawn in blocks, each from its own random generator, so the first rows of a set do not
depend on how many are requested. The top two bits of a block's seed are its stream (train, test,
shared, fresh), the rest is a hash of task, seed and block: blocks of different streams never have
the same seed.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

IGNORE = -100
"""Target of positions that do not count."""

Split = Literal["train", "test"]

_STREAMS = ("train", "test", "shared", "fresh")
# Large enough that drawing is vectorised, small enough that a few rows are cheap.
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
    """Common options of all tasks. Subclasses have the published values as defaults.

    Attributes:
        seq_len: tokens of one problem; the model may see one fewer (``input_len``).
        train_size: number of training sequences.
        test_size: number of test sequences.
    """

    seq_len: int
    train_size: int = 12_800
    test_size: int = 1_280

    scored: ClassVar[str]
    """Description of the targets that count in the test set."""
    SHORT: ClassVar[dict[str, Any]]
    """Options of an example that fits on one line."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of guessing among the possible answers."""

    @property
    def input_len(self) -> int:
        """Length of a row of inputs."""
        return self.seq_len

    @abstractmethod
    def token_names(self) -> list[str]:
        """A readable name for every token."""

    @abstractmethod
    def _draw(self, split: Split, count: int, generator: torch.Generator, seed: int) -> Sequences:
        """Draw independent rows; ``seed`` is that of the set, for what all its rows share."""

    def size(self, split: Split) -> int:
        """Number of sequences in a split."""
        return self.train_size if check_split(split) == "train" else self.test_size

    def generate(self, split: Split, *, seed: int = 0, count: int | None = None) -> Sequences:
        """The training or test set of a random seed.

        Args:
            split: ``"train"`` or ``"test"``, which draw from separate streams.
            seed: random seed; the same seed gives the same set.
            count: return the first ``count`` sequences, which may exceed the size of the set; None
                for all.

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
        """Draw rows with a given random generator.

        Args:
            count: number of rows.
            generator: the random generator.
            split: whether targets are those of training or of test.
            seed: random seed of what all rows of a set share, such as the map of memorization.
        """
        check_split(split)
        return self._draw(split, count, generator, seed)

    def stream(
        self, batch_size: int, *, split: Split = "train", seed: int = 0
    ) -> Iterator[Sequences]:
        """An endless stream of new batches, independent of both sets.

        Args:
            batch_size: rows of a batch.
            split: whether targets are those of training or of test.
            seed: random seed of the stream.

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
        # torch's CPU generator uses only 32 bits of a seed.
        start = _STREAMS.index(stream) << 30 | int.from_bytes(digest[:4], "big") >> 2
        return torch.Generator().manual_seed(start)


def leakage(train: Tensor, test: Tensor) -> float:
    """Share of test inputs that also occur among the training inputs.

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

    The number is the row read as digits in ``base``, modulo 2^64. It is exact if ``base`` exceeds
    all digits and there is no overflow; the default base, large and odd, makes it a good hash.
    """
    codes = torch.zeros(len(rows), dtype=torch.int64)
    for column in rows.unbind(1):
        codes = codes * base + column
    return codes


def uniform(shape: tuple[int, ...], high: int, generator: torch.Generator) -> Tensor:
    """Uniform random integers from 0 to ``high`` - 1."""
    return torch.randint(high, shape, generator=generator)


def next_tokens(tokens: Tensor) -> Sequences:
    """Inputs, and the token after each as its target."""
    return Sequences(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def at_least(task: object, **bounds: int) -> None:
    """Raise an error unless each named option of ``task`` is at least its bound."""
    for name, least in bounds.items():
        if getattr(task, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(task, name)}.")


def check_split(split: str) -> str:
    """Return the split, or raise an error that lists the possible ones."""
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    return split
