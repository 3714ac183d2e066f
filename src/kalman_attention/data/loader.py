"""Batches from shards: exactly resumable, divided over ranks, as fast as memory.

There are two loaders with the same interface:

* ``WindowLoader`` (A): concatenated documents, divided into windows. Every token is used; a row may
  begin in the middle of a document.
* ``PackingLoader`` (B): every row begins with a document. From a buffer of documents, the longest
  that fits is taken until none does, then the shortest is cropped to fill the row. There is no
  padding; cropped tokens are discarded (counted in ``discarded``), which is a large part if
  documents are long compared with a row.

Rank r of w reads groups r, r + w, ... of consecutive documents, repeatedly. Rows contain several
documents; for a model that should forget between them use ``Batch.packed``.
"""

import bisect
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kalman_attention._files import sha256
from kalman_attention.data.shards import INDEX, TRAIN, ShardedTokens, Tokens

# Ranks read whole groups: consecutive documents are read from disk in order.
GROUP_DOCUMENTS = 1024
# More documents fill rows more tightly, but take longer to search and to store in a cursor.
BUFFER_DOCUMENTS = 1000


class Batch(NamedTuple):
    """Rows of tokens.

    Attributes:
        inputs: ``[B, T]`` int64.
        targets: the token after each, ``[B, T]`` int64.
        starts: True where documents begin in the inputs, ``[B, T]`` bool.
    """

    inputs: Tensor
    targets: Tensor
    starts: Tensor

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs and targets as one row ``[1, B T]``, and ``cu_seqlens``, its boundaries, int32.

        There is a boundary at every row and at every document, so that the state of a model never
        passes from one document to another.
        """
        starts = self.starts.clone()
        starts[:, :1] = True
        flat = starts.reshape(-1)
        end = flat.new_tensor([flat.numel()], dtype=torch.int32)
        bounds = torch.cat([flat.nonzero().squeeze(1).to(torch.int32), end])
        return self.inputs.reshape(1, -1), self.targets.reshape(1, -1), bounds


class _Span(NamedTuple):
    """A group of documents: its position in a shard."""

    shard: int
    begin: int
    end: int


class _Documents:
    """The documents of one rank, numbered from 0 in the order it reads them."""

    def __init__(self, data: ShardedTokens, split: str, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to {world_size - 1}, got {rank}.")
        shards = data.shards(split)
        count = sum(shard.documents for shard in shards)
        if count < world_size:
            raise ValueError(
                f"{count} documents of {split} are too few for {world_size} ranks: each needs one."
            )
        self.bos = data.index.bos
        self.tokens: list[Tokens] = [data.tokens(shard) for shard in shards]
        offsets = [data.offsets(shard) for shard in shards]
        groups = _groups([shard.documents for shard in shards], world_size)[rank::world_size]
        self.shard = np.concatenate([np.full(g.end - g.begin, g.shard) for g in groups])
        self.begin = np.concatenate([offsets[g.shard][g.begin : g.end] for g in groups])
        ends = [offsets[g.shard][g.begin + 1 : g.end + 1] for g in groups]
        self.length = np.concatenate(ends) - self.begin
        self.stretches = [
            self.tokens[g.shard][offsets[g.shard][g.begin] : offsets[g.shard][g.end]]
            for g in groups
        ]

    def __len__(self) -> int:
        return len(self.length)


def _groups(counts: list[int], world_size: int) -> list[_Span]:
    """Groups of documents of all shards; smaller groups if there are too few for all ranks."""
    size = GROUP_DOCUMENTS
    while True:
        found = [
            _Span(shard, begin, min(begin + size, count))
            for shard, count in enumerate(counts)
            for begin in range(0, count, size)
        ]
        if len(found) >= world_size or size == 1:
            return found
        size //= 2


class _Loader:
    """Common part of both loaders: their documents, and a cursor that JSON can represent.

    Args:
        data: the opened shards.
        batch_size: rows of a batch.
        seq_len: tokens of a row.
        split: ``"train"`` or ``"validation"``.
        rank: index of the part to read.
        world_size: number of parts.
    """

    kind = ""

    def __init__(
        self,
        data: ShardedTokens,
        batch_size: int,
        seq_len: int,
        *,
        split: str = TRAIN,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1 or seq_len < 1:
            raise ValueError(
                f"batch_size and seq_len must be at least 1, got {batch_size} and {seq_len}."
            )
        self.batch_size, self.seq_len = batch_size, seq_len
        self._documents = _Documents(data, split, rank, world_size)
        self._about = {
            "kind": self.kind,
            "data": sha256(data.folder / INDEX),
            "split": split,
            "rank": rank,
            "world_size": world_size,
        }

    def __iter__(self) -> "_Loader":
        """The loader itself, which never ends."""
        return self

    def __next__(self) -> Batch:
        """The next batch."""
        rows = self._rows()  # [B, T + 1], uint16 or uint32
        inputs = torch.from_numpy(rows[:, :-1].astype(np.int64))
        targets = torch.from_numpy(rows[:, 1:].astype(np.int64))
        return Batch(inputs, targets, inputs == self._documents.bos)

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader, as plain values that JSON can represent."""
        return {**self._about, **self._cursor()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly from a ``state_dict``."""
        differs = [name for name, value in self._about.items() if state.get(name) != value]
        if differs:
            said = ", ".join(f"{n}: {state.get(n)} then, {self._about[n]} now" for n in differs)
            raise ValueError(
                f"the state of another loader cannot be resumed ({said}). Use the same shards, "
                "loader and number of ranks, or start with a new loader."
            )
        self._move(state)

    def _rows(self) -> Tokens:
        """Tokens of the next batch, ``[B, T + 1]``."""
        raise NotImplementedError

    def _cursor(self) -> dict[str, Any]:
        raise NotImplementedError

    def _move(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class WindowLoader(_Loader):
    """Loader A: concatenated documents, divided into windows; common arguments, and ``lanes``.

    With one lane, every row continues where the previous row ended. With n lanes the text is read
    at n evenly spaced positions at once: a row continues where the n-th row before it ended, so
    that n consecutive rows, for example those of one update, come from n positions and not from one
    document.
    """

    kind = "windows"

    def __init__(
        self, data: ShardedTokens, batch_size: int, seq_len: int, *, lanes: int = 1, **options: Any
    ) -> None:
        super().__init__(data, batch_size, seq_len, **options)
        if lanes < 1:
            raise ValueError(f"lanes must be at least 1, got {lanes}.")
        sizes = [len(stretch) for stretch in self._documents.stretches]
        self._ends = np.cumsum(sizes)
        self._place = 0  # tokens read by all lanes together
        self._lanes = lanes
        if lanes > 1:
            self._about |= {"lanes": lanes, "seq_len": seq_len}

    @property
    def epoch(self) -> int:
        """Number of complete passes over the documents."""
        return self._place // int(self._ends[-1])

    def _rows(self) -> Tokens:
        B, T = self.batch_size, self.seq_len
        begin, self._place = self._place, self._place + B * T
        if self._lanes > 1:
            return np.stack([self._read(self._start(begin // T + i), T + 1) for i in range(B)])
        flat = self._read(begin, B * T + 1)
        # Windows overlap by one token: the last target of a row is the first input of the next.
        return np.lib.stride_tricks.sliding_window_view(flat, T + 1)[::T]

    def _start(self, row: int) -> int:
        """Position at which a row begins."""
        turn, lane = divmod(row, self._lanes)
        return lane * (int(self._ends[-1]) // self._lanes) + turn * self.seq_len

    def _read(self, place: int, count: int) -> Tokens:
        """``count`` tokens from a position on, across the ends of groups and epochs."""
        stretches, parts = self._documents.stretches, []
        place %= int(self._ends[-1])
        group = int(np.searchsorted(self._ends, place, "right"))
        inside = place - int(self._ends[group] - len(stretches[group]))
        while count:
            part = stretches[group][inside : inside + count]
            parts.append(part)
            count -= len(part)
            group, inside = (group + 1) % len(stretches), 0
        return np.concatenate(parts)

    def _cursor(self) -> dict[str, Any]:
        return {"place": self._place}

    def _move(self, state: dict[str, Any]) -> None:
        self._place = int(state["place"])


class PackingLoader(_Loader):
    """Loader B: rows that begin with a document, filled best-fit; common arguments only."""

    kind = "packing"

    def __init__(self, data: ShardedTokens, batch_size: int, seq_len: int, **options: Any) -> None:
        super().__init__(data, batch_size, seq_len, **options)
        self._lengths: list[int] = self._documents.length.tolist()
        self._capacity = min(BUFFER_DOCUMENTS, len(self._documents))
        self._buffer: list[tuple[int, int]] = []  # (length, -number), sorted
        self._next = 0
        self.discarded = 0
        self.used = 0

    @property
    def epoch(self) -> int:
        """Number of complete passes of the documents into the buffer."""
        return self._next // len(self._documents)

    def _rows(self) -> Tokens:
        rows = np.empty((self.batch_size, self.seq_len + 1), self._documents.tokens[0].dtype)
        for row in rows:
            self._fill(row)
        return rows

    def _fill(self, row: Tokens) -> None:
        filled, size = 0, len(row)
        while filled < size:
            self._refill()
            shortest = self._buffer[0][0]
            # The longest that fits, otherwise the shortest; among equals the oldest.
            most = max(size - filled, shortest)
            length, number = self._buffer.pop(bisect.bisect_right(self._buffer, (most, 1)) - 1)
            taken = min(length, size - filled)
            row[filled : filled + taken] = self._tokens(-number, taken)
            filled += taken
            self.used += taken
            self.discarded += length - taken

    def _refill(self) -> None:
        count = len(self._lengths)
        while len(self._buffer) < self._capacity:
            bisect.insort(self._buffer, (self._lengths[self._next % count], -self._next))
            self._next += 1

    def _tokens(self, number: int, count: int) -> Tokens:
        i = number % len(self._documents)
        begin = int(self._documents.begin[i])
        return self._documents.tokens[int(self._documents.shard[i])][begin : begin + count]

    def _cursor(self) -> dict[str, Any]:
        waiting = sorted(-number for _, number in self._buffer)
        return {
            "next": self._next,
            "waiting": waiting,
            "used": self.used,
            "discarded": self.discarded,
        }

    def _move(self, state: dict[str, Any]) -> None:
        self._next, self.used = int(state["next"]), int(state["used"])
        self.discarded = int(state["discarded"])
        count = len(self._lengths)
        self._buffer = sorted((self._lengths[n % count], -n) for n in state["waiting"])
