"""Fuzzy in-context recall: recall in which keys and values are motifs of one to three tokens.

::

    input        #  # | k1 k0 v0 v2 | k3 k2 v1 | k1 k0 v0 v2 | k3 k2
    test target  _  _ |  _  _  _  _ |  _  _  _ |  _ v0 v2  _ |  _ v1

A motif is an ordered selection of distinct tokens. In training, keys have one to three tokens, in
test always three: the test is harder than the training data. Training targets are the next token
everywhere, including padding. The last pair, the probe, repeats a pair that was placed somewhere in
the context; in about one of 43 sequences that place is past the end, and there is no answer.
"""

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kalman_attention.tasks.task import IGNORE, Sequences, Split, Task, at_least, next_tokens


@dataclass(frozen=True, kw_only=True)
class FuzzyRecall(Task):
    """Recall of motifs by motifs.

    Attributes:
        vocab_size: keys, then values, then padding: 7, 8 and 1 at the default of 16.
        seq_len: length of inputs and targets, padding on the left included.
        key_motif: longest key, in tokens.
        value_motif: longest value, in tokens.
        train_size: number of training sequences.
        test_size: number of test sequences.
    """

    vocab_size: int = 16
    seq_len: int = 128
    key_motif: int = 3
    value_motif: int = 3

    scored: ClassVar[str] = "all tokens of values whose key came before, and of the last value"
    SHORT: ClassVar[dict[str, Any]] = {
        "vocab_size": 9,
        "seq_len": 28,
        "key_motif": 2,
        "value_motif": 2,
    }

    def __post_init__(self) -> None:
        at_least(self, key_motif=1, value_motif=1)
        if self.num_keys < self.key_motif or self.num_values < self.value_motif:
            raise ValueError(
                f"a motif consists of distinct tokens: {self.num_keys} keys and {self.num_values} "
                f"values are too few for motifs of {self.key_motif} and {self.value_motif}. Use a "
                f"larger vocab_size than {self.vocab_size}."
            )
        at_least(self, seq_len=2 * (self.key_motif + self.value_motif) + 1)

    @property
    def num_keys(self) -> int:
        """Number of key tokens, 0 to num_keys - 1."""
        return (self.vocab_size - 1) // 2

    @property
    def num_values(self) -> int:
        """Number of value tokens, after the keys."""
        return self.vocab_size - 1 - self.num_keys

    @property
    def chance(self) -> float:
        """One value token among all."""
        return 1.0 / self.num_values

    def token_names(self) -> list[str]:
        """k0 k1 ... v0 v1 ... and # for padding."""
        keys = (f"k{i}" for i in range(self.num_keys))
        return [*keys, *(f"v{i}" for i in range(self.num_values)), "#"]

    def _draw(self, split: Split, count: int, generator: torch.Generator, seed: int) -> Sequences:
        keys = _motifs(0, self.num_keys, self.key_motif)
        values = _motifs(self.num_keys, self.num_values, self.value_motif)
        shortest = 1 if split == "train" else self.key_motif

        def draw(motifs: _Motifs, shortest: int = 1) -> Tensor:
            return motifs.draw(count, shortest, generator)

        probe_key, probe_value = draw(keys, shortest), draw(values)
        probe_len = keys.sizes[probe_key] + values.sizes[probe_value]
        chosen = torch.rand(count, dtype=torch.float64, generator=generator)
        place = (chosen * (self.seq_len - 2 * probe_len)).long()
        end = self.seq_len - probe_len - self.key_motif - self.value_motif
        text = _Text(count, self.seq_len + 1, keys, values)
        bound = torch.full((count, len(keys.sizes)), -1)  # value of each key shown, per row
        placed = torch.zeros(count, dtype=torch.bool)
        # One pair per row and iteration; rows that are full wait for the others.
        while bool((active := text.length < end).any()):
            key = torch.where((text.length >= place) & ~placed, probe_key, draw(keys, shortest))
            is_probe = key == probe_key
            fresh = torch.where(is_probe, probe_value, draw(values))
            known = bound.gather(1, key.unsqueeze(1)).squeeze(1)
            value = torch.where(known < 0, fresh, known)
            text.append(key, value, scored=known >= 0, where=active)
            remembered = torch.where(active, value, known)
            bound.scatter_(1, key.unsqueeze(1), remembered.unsqueeze(1))
            placed |= is_probe
        always = torch.ones(count, dtype=torch.bool)
        text.append(probe_key, probe_value, scored=always, where=always)
        tokens, targets = text.flush_right(self.vocab_size - 1)
        rows = next_tokens(tokens)
        return rows if split == "train" else Sequences(rows.inputs, targets[:, 1:].contiguous())


class _Motifs(NamedTuple):
    """All motifs of up to some size, shortest first.

    Attributes:
        tokens: ``[n, longest]``, padded with -1.
        sizes: tokens of each motif, ``[n]``.
        starts: index of the first motif of each size, then the end, ``[longest + 1]``.
    """

    tokens: Tensor
    sizes: Tensor
    starts: Tensor

    def draw(self, count: int, shortest: int, generator: torch.Generator) -> Tensor:
        """Draw motifs ``[count]``: first a size of at least ``shortest``, then a motif of it."""
        longest = len(self.starts) - 1
        size = torch.randint(shortest, longest + 1, (count,), generator=generator)
        start, end = self.starts[size - 1], self.starts[size]
        chosen = torch.rand(count, dtype=torch.float64, generator=generator)
        return start + (chosen * (end - start)).long()


def _motifs(first: int, count: int, longest: int) -> _Motifs:
    """Motifs of the ``count`` tokens from ``first`` on."""
    letters = range(first, first + count)
    by_size = [list(itertools.permutations(letters, size)) for size in range(1, longest + 1)]
    padded = [(*m, *(-1,) * (longest - len(m))) for motifs in by_size for m in motifs]
    tokens = torch.tensor(padded)
    starts = torch.tensor([0, *itertools.accumulate(len(motifs) for motifs in by_size)])
    return _Motifs(tokens, (tokens >= 0).sum(1), starts)


class _Text:
    """Rows that grow by pairs, each at its own pace."""

    def __init__(self, rows: int, width: int, keys: _Motifs, values: _Motifs) -> None:
        self.keys, self.values, self.width = keys, values, width
        self.length = torch.zeros(rows, dtype=torch.int64)
        # One extra column takes everything that is not to be written.
        self.tokens = torch.full((rows, width + 1), IGNORE)
        self.targets = torch.full((rows, width + 1), IGNORE)

    def append(self, key: Tensor, value: Tensor, *, scored: Tensor, where: Tensor) -> None:
        """Add a pair to the rows in ``where``; its value is a target in those in ``scored``."""
        pair = torch.cat([self.keys.tokens[key], self.values.tokens[value]], 1)
        real = (pair >= 0) & where.unsqueeze(1)
        places = self.length.unsqueeze(1) + real.cumsum(1) - 1
        places = torch.where(real, places, self.width)
        is_value = torch.arange(pair.shape[1]) >= self.keys.tokens.shape[1]
        asked = torch.where(scored.unsqueeze(1) & is_value, pair, IGNORE)
        self.tokens.scatter_(1, places, pair)
        self.targets.scatter_(1, places, asked)
        self.length += real.sum(1)

    def flush_right(self, pad: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets ``[rows, width]``, padded on the left."""
        source = torch.arange(self.width) - (self.width - self.length).unsqueeze(1)
        padding, source = source < 0, source.clamp(min=0)
        tokens = self.tokens.gather(1, source).masked_fill(padding, pad)
        return tokens, self.targets.gather(1, source).masked_fill(padding, IGNORE)
