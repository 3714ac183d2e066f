"""Long-context recall of many pairs (MQAR), in two versions.

``MQAR`` is what the paper ran, as far as its settings reveal: MAD's recall with 128 keys over 2048
tokens, illustrated in ``mad/recall.py``.

``ZoologyMQAR`` is the task of that name from Zoology: all pairs first, then every key once more,
most of them soon after the pairs. The answer is never in the input, and only the queries are
targets in training.

::

    input   k3 v6 k6 v1 k6  .  .  . k3  .  .  .
    target   _  _  _  _ v1  _  _  _ v6  _  _  _      . is filler, by default a random token
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kalman_attention.tasks.mad.recall import Recall
from kalman_attention.tasks.task import IGNORE, Sequences, Split, Task, at_least, uniform


@dataclass(frozen=True, kw_only=True)
class MQAR(Recall):
    """``Recall`` at the length and vocabulary of the paper's MQAR; options as there."""

    vocab_size: int = 256
    seq_len: int = 2048


@dataclass(frozen=True, kw_only=True)
class ZoologyMQAR(Task):
    """Zoology's multi-query associative recall.

    Attributes:
        vocab_size: filler 0, then vocab_size / 2 - 1 keys, then vocab_size / 2 values.
        seq_len: length of inputs and targets, even.
        num_pairs: pairs per sequence; keys are distinct, and so are values.
        power: slots of queries are drawn with weights rank^(power - 1); the small published value
            puts most queries soon after the pairs.
        random_filler: replace filler by random tokens.
        train_size: number of training sequences.
        test_size: number of test sequences.
    """

    vocab_size: int = 8192
    seq_len: int = 512
    num_pairs: int = 64
    power: float = 0.01
    random_filler: bool = True
    train_size: int = 100_000
    test_size: int = 3_000

    scored: ClassVar[str] = "the value of each queried key"
    SHORT: ClassVar[dict[str, Any]] = {
        "vocab_size": 16,
        "seq_len": 12,
        "num_pairs": 2,
        "random_filler": False,
    }

    def __post_init__(self) -> None:
        at_least(self, num_pairs=1, seq_len=4 * self.num_pairs)
        if self.seq_len % 2 or self.vocab_size % 2:
            raise ValueError(
                f"seq_len and vocab_size must be even, got {self.seq_len} and {self.vocab_size}."
            )
        if self.num_pairs > self.num_keys:
            raise ValueError(
                f"num_pairs must be at most vocab_size / 2 - 1 = {self.num_keys}, because keys are "
                f"distinct; got {self.num_pairs}."
            )

    @property
    def num_keys(self) -> int:
        """Number of keys, tokens 1 to num_keys."""
        return self.vocab_size // 2 - 1

    @property
    def chance(self) -> float:
        """One value among all."""
        return 2.0 / self.vocab_size

    def token_names(self) -> list[str]:
        """. for filler, then k1 k2 ... v0 v1 ..."""
        values = (f"v{i}" for i in range(self.vocab_size // 2))
        return [".", *(f"k{i}" for i in range(1, self.num_keys + 1)), *values]

    def _draw(self, split: Split, count: int, generator: torch.Generator, seed: int) -> Sequences:
        pairs, half = self.num_pairs, self.vocab_size // 2
        keys = 1 + _distinct(count, pairs, self.num_keys, generator)
        values = half + _distinct(count, pairs, half, generator)
        inputs = torch.zeros(count, self.seq_len, dtype=torch.int64)
        inputs[:, : 2 * pairs : 2], inputs[:, 1 : 2 * pairs : 2] = keys, values
        # As published, queries are at every second position after the pairs.
        ranks = torch.arange(1, (self.seq_len - 2 * pairs) // 2 + 1, dtype=torch.float64)
        weights = (ranks ** (self.power - 1.0)).expand(count, -1)
        slots = torch.multinomial(weights, pairs, generator=generator)
        places = 2 * pairs + 2 * slots
        inputs.scatter_(1, places, keys)
        targets = torch.full_like(inputs, IGNORE).scatter_(1, places, values)
        if self.random_filler:
            filler = uniform(tuple(inputs.shape), self.vocab_size, generator)
            inputs = torch.where(inputs == 0, filler, inputs)
        return Sequences(inputs, targets)


def _distinct(rows: int, count: int, high: int, generator: torch.Generator) -> Tensor:
    """``count`` distinct numbers below ``high`` in every row, in random order."""
    # By the birthday bound a row has a repeat with probability 1 - exp(-count^2 / (2 high)). Where
    # most rows would, shuffling is cheaper than drawing again until all numbers are distinct.
    if count * count > 2 * high:
        ranks = torch.rand(rows, high, dtype=torch.float64, generator=generator)
        return ranks.topk(count).indices
    found = uniform((rows, count), high, generator)
    while len(bad := _with_repeats(found)):
        found[bad] = uniform((len(bad), count), high, generator)
    return found


def _with_repeats(rows: Tensor) -> Tensor:
    """Indices of the rows that contain a number twice."""
    ordered = rows.sort(1).values
    return (ordered[:, 1:] == ordered[:, :-1]).any(1).nonzero().squeeze(1)
