"""Compression: put a random sequence into one vector, and read it back from there.

::

    input   c2 c3 c3 c2 c3  #
    target  c2 c3 c3 c2 c3  #

A model for this task decodes every position from what it holds after the last token
(``models/autoencoder.py``). The last target is always the same and is scored nevertheless, as in
the published task; the accuracy on content alone is a metric of its own.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kalman_attention.tasks.task import Sequences, Split, Task, at_least, uniform


@dataclass(frozen=True, kw_only=True)
class Compression(Task):
    """Reconstruction of random tokens.

    Attributes:
        vocab_size: content tokens, then the compression token.
        seq_len: length of inputs and targets, the compression token included.
        train_size: number of training sequences.
        test_size: number of test sequences.
    """

    vocab_size: int = 16
    seq_len: int = 32

    scored: ClassVar[str] = "every token, the constant last one too"
    SHORT: ClassVar[dict[str, Any]] = {"vocab_size": 5, "seq_len": 6}

    def __post_init__(self) -> None:
        at_least(self, vocab_size=2, seq_len=2)

    @property
    def chance(self) -> float:
        """Macro accuracy of a guess: the last token is known, one class of all."""
        return 2.0 / self.vocab_size

    def token_names(self) -> list[str]:
        """c0 c1 ... and # for the compression token."""
        return [*(f"c{i}" for i in range(self.vocab_size - 1)), "#"]

    def _draw(self, split: Split, count: int, generator: torch.Generator, seed: int) -> Sequences:
        tokens = uniform((count, self.seq_len), self.vocab_size - 1, generator)
        tokens[:, -1] = self.vocab_size - 1
        return Sequences(tokens, tokens.clone())
