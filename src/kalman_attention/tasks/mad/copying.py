"""Selective copying and compression: reproduce tokens that were seen before."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kalman_attention.tasks.task import IGNORE, Sequences, Split, Task, at_least, uniform


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(Task):
    """Selective copying: remember the tokens among blanks, and output them in order at the end.

    ::

        input   .  . c2  . c3  .  . c3  >  .  .  .
        target  _  _  _  _  _  _  _  _  _ c2 c3 c3

    Blanks are placed before content tokens only, so the last content token is right before the
    marker. The model's output is never fed back to it.

    Attributes:
        vocab_size: content tokens, then blank, then marker.
        seq_len: length of inputs and targets.
        num_copied: content tokens per sequence.
        train_size: number of training sequences.
        test_size: number of test sequences.
    """

    vocab_size: int = 16
    seq_len: int = 256
    num_copied: int = 16

    scored: ClassVar[str] = "the copies, after the marker"
    SHORT: ClassVar[dict[str, Any]] = {"vocab_size": 6, "seq_len": 14, "num_copied": 3}

    def __post_init__(self) -> None:
        at_least(self, vocab_size=3, num_copied=1)
        if self.num_blanks < 0:
            raise ValueError(
                f"seq_len must be at least 2 num_copied + 1 = {2 * self.num_copied + 1}, to hold "
                f"the tokens, the marker and the copies; got {self.seq_len}."
            )

    @property
    def num_blanks(self) -> int:
        """Blanks before the marker."""
        return self.seq_len - 2 * self.num_copied - 1

    @property
    def chance(self) -> float:
        """One content token among all."""
        return 1.0 / (self.vocab_size - 2)

    def token_names(self) -> list[str]:
        """c0 c1 ... and . for blank, > for the marker."""
        return [*(f"c{i}" for i in range(self.vocab_size - 2)), ".", ">"]

    def _draw(self, split: Split, count: int, generator: torch.Generator, seed: int) -> Sequences:
        blank, marker = self.vocab_size - 2, self.vocab_size - 1
        content = uniform((count, self.num_copied), blank, generator)
        # Each blank picks the content token that it precedes.
        picks = uniform((count, self.num_blanks), self.num_copied, generator)
        fallen = torch.zeros_like(content).scatter_add(1, picks, torch.ones_like(picks))
        places = fallen.cumsum(1) + torch.arange(self.num_copied)
        inputs = torch.full((count, self.seq_len), blank)
        inputs.scatter_(1, places, content)
        start = self.seq_len - self.num_copied
        inputs[:, start - 1] = marker
        targets = torch.full_like(inputs, IGNORE)
        targets[:, start:] = content
        return Sequences(inputs, targets)


@dataclass(frozen=True, kw_only=True)
class Compression(Task):
    """Compression: encode a random sequence in one vector, and decode it from there.

    ::

        input   c2 c3 c3 c2 c3  #
        target  c2 c3 c3 c2 c3  #

    A model for this task decodes every position from its state after the last token
    (``models/autoencoder.py``). The last target is always the same and still counts, as in the
    published task; the accuracy on content alone is a separate metric.

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
