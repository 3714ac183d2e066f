"""Selective copying: remember the tokens among blanks, and say them in order at the end.

::

    input   .  . c2  . c3  .  . c3  >  .  .  .
    target  _  _  _  _  _  _  _  _  _ c2 c3 c3

Blanks fall before content tokens only, so the last of these stands right before the marker. What
the model says is never fed back to it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kalman_attention.tasks.task import IGNORE, Sequences, Split, Task, at_least, uniform


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(Task):
    """Copying of content tokens from among blanks.

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
        # Each blank picks the content token it falls before.
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
