"""Batches from shards: exact to resume, divided over ranks, as fast as memory.

Two loaders, of the same interface:

* ``WindowLoader`` (A): documents one after the other, cut into windows. Every token is used; a row
  may begin in the middle of a document.
* ``PackingLoader`` (B): every row begins with a document. From a buffer of documents the longest
  that fits is taken until none does, then the shortest is cropped to fill the row. No padding; what
  is cropped off is discarded (``discarded`` counts it), which is a lot where documents are long
  against a row.

Rank r of w reads groups r, r + w, ... of consecutive documents, over and over. Rows hold several
documents; a model that is to forget between them gets ``Batch.packed``.
"""

import bisect
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kalman_attention._files import sha256
from kalman_attention.data.shards import INDEX, TRAIN, ShardedTokens, Tokens

GROUP_DOCUMENTS = 1024
BUFFER_DOCUMENTS = 1000


class Batch(NamedTuple):
    """Rows of tokens.

    Attributes:
        inputs: ``[B, T]`` int64.
        targets: the token after each, ``[B, T]`` int64.
        starts: where documents begin in the inputs, ``[B, T]`` bool.
    """

    inputs: Tensor
    targets: Tensor
    starts: Tensor

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs and targets as one row ``[1, B T]``, and ``cu_seqlens``, int32, its borders.

        A row begins a new stretch, and so does every document in it: with these the state of a
        model never crosses from one document to another.
        """
        starts = self.starts.clone()
        starts[:, :1] = True
        flat = starts.reshape(-1)
        end = flat.new_tensor([flat.numel()], dtype=torch.int32)
        borders = torch.cat([flat.nonzero().squeeze(1).to(torch.int32), end])
        return self.inputs.reshape(1, -1), self.targets.reshape(1, -1), borders


class _Span(NamedTuple):
    """A group of documents: where it lies in its shard."""

    shard: int
    begin: int
    end: int


class _Documents:
    """The documents of one rank, numbered from 0 in the order it reads them."""

    def __init__(self, data: ShardedTokens, split: str, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}: they count from 0.")
        shards = data.shards(split)
        count = sum(shard.documents for shard in shards)
        if count < world_size:
            raise ValueError(f"{count} documents of {split} cannot be divided by {world_size}.")
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
    """Groups of documents of all shards; smaller ones where there would be too few."""
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
    """What both loaders share: their documents, and a cursor that survives JSON.

    Args:
        data: the opened shards.
        batch_size: rows of a batch.
        seq_len: tokens of a row.
        split: ``"train"`` or ``"validation"``.
        rank: which part to read.
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
            raise ValueError(f"a batch needs rows and tokens, got {batch_size} x {seq_len}.")
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
        """Itself: it never ends."""
        return self

    def __next__(self) -> Batch:
        """The next batch."""
        rows = self._rows()
        inputs = torch.from_numpy(rows[:, :-1].astype(np.int64))
        targets = torch.from_numpy(rows[:, 1:].astype(np.int64))
        return Batch(inputs, targets, inputs == self._documents.bos)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: plain values, which JSON keeps."""
        return {**self._about, **self._cursor()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state_dict`` was taken."""
        differs = [name for name, value in self._about.items() if state.get(name) != value]
        if differs:
            said = ", ".join(f"{n}: {state.get(n)} then, {self._about[n]} now" for n in differs)
            raise ValueError(
                f"the state of another loader cannot be resumed ({said}). Use the shards, the "
                "loader and the number of ranks of then, or begin with a new loader."
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
    """Loader A: documents one after the other, cut into windows; arguments as for both, and lanes.

    With one lane, rows and batches go on where the row before ended. With n lanes the text is read
    at n places at once, evenly apart: a row goes on where the n-th row before it ended, so that n
    rows in sequence, say of one update, are from as many places and not from one document.
    """

    kind = "windows"

    def __init__(
        self, data: ShardedTokens, batch_size: int, seq_len: int, *, lanes: int = 1, **options: Any
    ) -> None:
        super().__init__(data, batch_size, seq_len, **options)
        if lanes < 1:
            raise ValueError(f"the text is read at one place at least, not at {lanes}.")
        sizes = [len(stretch) for stretch in self._documents.stretches]
        self._ends = np.cumsum(sizes)
        self._place = 0  # tokens read, of all lanes together
        self._lanes = lanes
        if lanes > 1:
            self._about |= {"lanes": lanes, "seq_len": seq_len}

    @property
    def epoch(self) -> int:
        """How often everything has been read."""
        return self._place // int(self._ends[-1])

    def _rows(self) -> Tokens:
        B, T = self.batch_size, self.seq_len
        begin, self._place = self._place, self._place + B * T
        if self._lanes > 1:
            return np.stack([self._read(self._start(begin // T + i), T + 1) for i in range(B)])
        flat = self._read(begin, B * T + 1)
        return np.lib.stride_tricks.sliding_window_view(flat, T + 1)[::T]

    def _start(self, row: int) -> int:
        """Where a row begins."""
        turn, lane = divmod(row, self._lanes)
        return lane * (int(self._ends[-1]) // self._lanes) + turn * self.seq_len

    def _read(self, place: int, count: int) -> Tokens:
        """A number of tokens from a place on, over the borders of groups and epochs."""
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
    """Loader B: rows that begin with a document, filled best-fit; arguments as for both."""

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
        """How often everything has been taken into the buffer."""
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
            # The longest that fits, else the shortest; among equals the one that came first.
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
