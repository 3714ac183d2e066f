"""Batches with an exact cursor: what comes next depends on a seed and a count, nothing else."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kalman_attention.train.objective import Loss
from kalman_attention.train.seeds import derive_seed


class Batches(Protocol):
    """What ``fit`` draws from; a token loader needs no more than this.

    A class with ``__len__`` also says how many batches make an epoch.
    """

    def __next__(self) -> Any:
        """The next batch; there is always one."""

    def state_dict(self) -> dict[str, Any]:
        """Where the cursor is, as plain values that survive JSON."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the cursor there."""


class _Cursor:
    """Batches that are a function of their number."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.position = 0

    def batch(self, index: int) -> Any:
        raise NotImplementedError

    def __next__(self) -> Any:
        found = self.batch(self.position)
        self.position += 1
        return found

    def state_dict(self) -> dict[str, Any]:
        """Position, and what the order depends on."""
        return {"position": self.position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, if these are the same batches."""
        expected = {name: value for name, value in self.state_dict().items() if name != "position"}
        found = {name: value for name, value in state.items() if name != "position"}
        if found != expected:
            raise ValueError(
                f"the cursor belongs to other batches: it says {found}, these are {expected}. "
                "Build the batches as the run that is resumed did."
            )
        self.position = state["position"]


class TensorBatches(_Cursor):
    """A data set in memory, cut into batches, in a new order every epoch.

    The order of an epoch is a permutation drawn from (seed, epoch). The last batch of an epoch
    holds what is left, so every example comes exactly once per epoch.

    Args:
        tensors: with one first axis, the examples.
        batch_size: examples per batch.
        seed: of the order.
        shuffle: False keeps the order of the tensors.
    """

    def __init__(
        self, tensors: Sequence[Tensor], batch_size: int, seed: int = 0, *, shuffle: bool = True
    ) -> None:
        super().__init__(seed)
        sizes = [len(tensor) for tensor in tensors]
        if not sizes or min(sizes) != max(sizes) or min(sizes) == 0:
            raise ValueError(
                f"tensors must share a first axis of at least one example, got lengths {sizes}."
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        self.tensors = tuple(tensors)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.size = sizes[0]
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-self.size // self.batch_size)

    def batch(self, index: int) -> tuple[Tensor, ...]:
        """Batch number ``index`` of all epochs, counted from 0."""
        epoch, place = divmod(index, len(self))
        start = place * self.batch_size
        if not self.shuffle:
            return tuple(tensor[start : start + self.batch_size] for tensor in self.tensors)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
            self._order = torch.randperm(self.size, generator=generator)
            self._epoch = epoch
        rows = self._order[start : start + self.batch_size]
        return tuple(tensor[rows.to(tensor.device)] for tensor in self.tensors)

    def state_dict(self) -> dict[str, Any]:
        """Position, and what the order depends on."""
        made_of = {"size": self.size, "batch_size": self.batch_size, "shuffle": self.shuffle}
        return {**super().state_dict(), **made_of, "digest": self._digest}

    @cached_property
    def _digest(self) -> str:
        """A number for what the tensors hold, so that other data is not taken for the same."""
        from safetensors.torch import save  # here: importing the library brings nothing but torch

        found = hashlib.sha256()
        for tensor in self.tensors:
            found.update(save({"tensor": tensor.detach().contiguous()}))
        return found.hexdigest()[:16]


class StreamBatches(_Cursor):
    """Batches made when they are needed, never twice the same.

    Args:
        make: builds a batch from a CPU generator that is seeded with (seed, number of the batch).
        seed: of all batches.
    """

    def __init__(self, make: Callable[[torch.Generator], Any], seed: int = 0) -> None:
        super().__init__(seed)
        self.make = make
        self._generator = torch.Generator()

    def batch(self, index: int) -> Any:
        """Batch number ``index``, counted from 0."""
        return self.make(self._generator.manual_seed(derive_seed(self.seed, "batch", index)))


class GrowingBatches(_Cursor):
    """Fresh sequences that get longer as they are learned: a curriculum.

    The first batches have the length ``start``. Whenever the loss of a batch falls below ``below``,
    the next is one longer, up to ``end``. What the loss was is part of the cursor, so a run that
    goes on after a kill sees the same batches.

    Args:
        make: builds a batch of sequences of a length, with a CPU generator as in ``StreamBatches``.
        seed: of all batches.
        start: first length.
        end: last length.
        below: loss that is low enough to go on.
    """

    def __init__(
        self,
        make: Callable[[int, torch.Generator], Any],
        seed: int = 0,
        *,
        start: int,
        end: int,
        below: float,
    ) -> None:
        super().__init__(seed)
        if not 1 <= start <= end:
            raise ValueError(f"1 <= start <= end must hold, got {start} and {end}.")
        self.make, self.length, self.end, self.below = make, start, end, below
        self._generator = torch.Generator()

    def batch(self, index: int) -> Any:
        """Batch number ``index``, counted from 0, at the length that has been reached."""
        seeded = self._generator.manual_seed(derive_seed(self.seed, "batch", index))
        return self.make(self.length, seeded)

    def watching(self, loss: Loss) -> Loss:
        """The same loss; these batches grow as it falls."""

        def watched(model: nn.Module, batch: Any, generator: torch.Generator) -> Any:
            found = loss(model, batch, generator)
            value = found[0] if isinstance(found, tuple) else found
            self.length += value.item() < self.below and self.length < self.end
            return found

        return watched

    def state_dict(self) -> dict[str, Any]:
        """Position and length, and what the batches depend on."""
        fixed = {"end": self.end, "below": self.below}
        return {**super().state_dict(), **fixed, "length": self.length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, if these are the same batches."""
        length, self.length = self.length, state["length"]
        try:
            super().load_state_dict(state)
        except ValueError:
            self.length = length
            raise
