"""Memorization: a fixed dictionary that only the weights can hold; values are never shown.

::

    input   k1  ? k1  ? k2  ?
    target   _ v1  _ v1  _ v3

The map is one to one, the same for all sequences of train and test, and changes with the seed.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kalman_attention.tasks.task import IGNORE, Sequences, Split, Task, at_least, uniform


@dataclass(frozen=True, kw_only=True)
class Memorization(Task):
    """Recall of a dictionary learned by heart.

    Attributes:
        vocab_size: keys, then values, then the insert token. At 256 there are 127 keys and 128
            values, so that one value is never used.
        seq_len: length of inputs and targets, even.
        train_size: number of training sequences.
        test_size: number of test sequences.
    """

    vocab_size: int = 256
    seq_len: int = 32
    train_size: int = 256

    scored: ClassVar[str] = "the value, after its key"
    SHORT: ClassVar[dict[str, Any]] = {"vocab_size": 8, "seq_len": 8}

    def __post_init__(self) -> None:
        at_least(self, vocab_size=3, seq_len=2)
        if self.seq_len % 2:
            raise ValueError(f"seq_len must be even, keys and inserts in turn; got {self.seq_len}.")

    @property
    def num_keys(self) -> int:
        """Number of keys, tokens 0 to num_keys - 1."""
        return (self.vocab_size - 1) // 2

    @property
    def chance(self) -> float:
        """One value of those in the map."""
        return 1.0 / self.num_keys

    def token_names(self) -> list[str]:
        """k0 k1 ... v0 v1 ... and ? for insert."""
        values = self.vocab_size - 1 - self.num_keys
        return [*(f"k{i}" for i in range(self.num_keys)), *(f"v{i}" for i in range(values)), "?"]

    def mapping(self, seed: int) -> Tensor:
        """The value of every key, ``[num_keys]``."""
        values = self.vocab_size - 1 - self.num_keys
        order = torch.randperm(values, generator=self._generator("shared", seed))
        return self.num_keys + order[: self.num_keys]

    def _draw(self, split: Split, count: int, generator: torch.Generator, seed: int) -> Sequences:
        keys = uniform((count, self.seq_len // 2), self.num_keys, generator)
        inputs = torch.full((count, self.seq_len), self.vocab_size - 1)
        targets = torch.full_like(inputs, IGNORE)
        inputs[:, ::2] = keys
        targets[:, 1::2] = self.mapping(seed)[keys]
        return Sequences(inputs, targets)
