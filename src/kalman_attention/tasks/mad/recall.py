"""In-context recall, with and without noise, and memorization: the value that belongs to a key."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kalman_attention.tasks.task import (
    IGNORE,
    Sequences,
    Split,
    Task,
    at_least,
    next_tokens,
    uniform,
)


@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """In-context recall: predict the value that followed a key earlier in the sequence.

    Keys are drawn at random, each bound to one value per sequence; keys may share a value. With
    noise, a pair may be replaced by two meaningless tokens.

    ::

        input         k0 v0 k0 v0 k3 v3 k2 v0 k0
        train target  v0 k0 v0 k3 v3 k2 v0 k0 v0     the next token, everywhere
        test target    _  _ v0  _  _  _  _  _ v0     the value, where its key was seen before

    Attributes:
        vocab_size: keys, then values, then noise tokens; half of the tokens that are not noise are
            keys.
        seq_len: tokens of one problem, even; the model sees all but the last.
        noise: probability that a pair is replaced by noise.
        noise_vocab: number of noise tokens.
        train_size: number of training sequences.
        test_size: number of test sequences.
    """

    vocab_size: int = 16
    seq_len: int = 128
    noise: float = 0.0
    noise_vocab: int = 0

    scored: ClassVar[str] = "values whose key came before"
    SHORT: ClassVar[dict[str, Any]] = {"vocab_size": 8, "seq_len": 16}

    def __post_init__(self) -> None:
        if self.seq_len % 2 or self.seq_len < 4:
            raise ValueError(f"seq_len must be even and at least 4 (two pairs), got {self.seq_len}")
        if not 0.0 <= self.noise < 1.0 or (self.noise > 0.0 and self.noise_vocab < 1):
            raise ValueError(
                f"noise must be in [0, 1) and have tokens to draw from, got noise={self.noise} "
                f"with noise_vocab={self.noise_vocab}."
            )
        if self.noise_vocab < 0 or self.num_keys < 1:
            raise ValueError(
                f"vocab_size must hold a key, a value and the noise_vocab={self.noise_vocab} noise "
                f"tokens, got {self.vocab_size}."
            )

    @property
    def num_keys(self) -> int:
        """Number of keys, tokens 0 to num_keys - 1."""
        return (self.vocab_size - self.noise_vocab) // 2

    @property
    def num_values(self) -> int:
        """Number of values, the tokens after the keys."""
        return self.vocab_size - self.noise_vocab - self.num_keys

    @property
    def input_len(self) -> int:
        """Length of a row of inputs: the last token is only a target."""
        return self.seq_len - 1

    @property
    def chance(self) -> float:
        """One value among all."""
        return 1.0 / self.num_values

    def token_names(self) -> list[str]:
        """k0 k1 ... v0 v1 ... n0 n1 ..."""
        counts = {"k": self.num_keys, "v": self.num_values, "n": self.noise_vocab}
        return [f"{letter}{i}" for letter, count in counts.items() for i in range(count)]

    def _draw(self, split: Split, count: int, generator: torch.Generator, seed: int) -> Sequences:
        pairs = self.seq_len // 2
        keys = uniform((count, pairs), self.num_keys, generator)
        noisy = self._noisy_slots(count, pairs, generator)
        first = _first_slots(keys, noisy, self.num_keys)
        # The last pair queries one of the keys that were shown, all equally likely.
        shown = (first < pairs - 1).float()  # [count, num_keys]
        keys[:, -1] = torch.multinomial(shown, 1, generator=generator).squeeze(1)
        # One value per key and row, drawn in advance: equivalent to drawing it when the key first
        # appears.
        bound = self.num_keys + uniform((count, self.num_keys), self.num_values, generator)
        values = bound.gather(1, keys)
        if self.noise > 0.0:
            lowest = self.num_keys + self.num_values
            noise = lowest + uniform((2, count, pairs), self.noise_vocab, generator)
            tokens = torch.where(noisy, noise, torch.stack([keys, values]))
        else:
            tokens = torch.stack([keys, values])
        rows = next_tokens(tokens.permute(1, 2, 0).flatten(1))  # keys and values alternate
        if split == "train":
            return rows
        asked = ~noisy & (first.gather(1, keys) < torch.arange(pairs))
        targets = torch.full_like(rows.inputs, IGNORE)
        targets[:, ::2] = torch.where(asked, values, IGNORE)
        return Sequences(rows.inputs, targets)

    def _noisy_slots(self, count: int, pairs: int, generator: torch.Generator) -> Tensor:
        """Mask of the noisy pairs, ``[count, pairs]``: never the last, nor one drawn at random."""
        if self.noise == 0.0:
            return torch.zeros(count, pairs, dtype=torch.bool)
        noisy = torch.rand(count, pairs, generator=generator) < self.noise
        noisy.scatter_(1, uniform((count, 1), pairs, generator), False)
        noisy[:, -1] = False
        # If the last slot was drawn, all others may be noise, and there would be nothing to query.
        noisy[noisy[:, :-1].all(1), 0] = False
        return noisy


def _first_slots(keys: Tensor, noisy: Tensor, num_keys: int) -> Tensor:
    """Slot of the first appearance of each key, ``[n, num_keys]``; the number of slots if none.

    The last slot does not count, because its key is chosen afterwards.
    """
    pairs = keys.shape[1]
    slots = torch.arange(pairs).expand_as(keys).masked_fill(noisy, pairs)
    first = torch.full((len(keys), num_keys), pairs)
    return first.scatter_reduce(1, keys[:, :-1], slots[:, :-1], "amin")


@dataclass(frozen=True, kw_only=True)
class NoisyRecall(Recall):
    """Noisy in-context recall: recall in which one pair in five is replaced by noise tokens.

    ::

        input        k3 v1 n2 n3 k0 v0 k3 v1 k0
        test target   _  _  _  _  _  _ v1  _ v0     as in recall; noise is never scored
    """

    vocab_size: int = 32
    noise: float = 0.2
    noise_vocab: int = 16

    SHORT: ClassVar[dict[str, Any]] = {"vocab_size": 12, "noise_vocab": 4, "seq_len": 16}


@dataclass(frozen=True, kw_only=True)
class Memorization(Task):
    """Memorization: a fixed dictionary that the weights have to store; values are never shown.

    ::

        input   k1  ? k1  ? k2  ?
        target   _ v1  _ v1  _ v3

    The map is one to one, the same for all sequences of train and test, and changes with the seed.

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
            raise ValueError(
                f"seq_len must be even, because keys and inserts alternate; got {self.seq_len}."
            )

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
