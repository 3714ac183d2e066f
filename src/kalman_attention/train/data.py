"""Batches with an exact cursor: the next batch depends only on a seed and a count."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kalman_attention.train.objective import Loss
from kalman_attention.train.seeds import derive_seed


class Batches(Protocol):
    """The interface of the data that ``fit`` trains on.

    If a class has ``__len__``, it is the number of batches in an epoch.
    """

    def __next__(self) -> Any:
        """The next batch; there is always one."""

    def state_dict(self) -> dict[str, Any]:
        """The position of the cursor, as plain values that JSON can represent."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move the cursor to a position."""


class _Cursor:
    """Batches that are a function of their index."""

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
        """The position, and everything that the order depends on."""
        return {"position": self.position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict`` of the same batches."""
        expected = {name: value for name, value in self.state_dict().items() if name != "position"}
        found = {name: value for name, value in state.items() if name != "position"}
        if found != expected:
            raise ValueError(
                f"the cursor belongs to other batches: it has {found}, these have {expected}. "
                "Build the batches as in the run that is being resumed."
            )
        self.position = state["position"]


class TensorBatches(_Cursor):
    """A data set in memory, split into batches, in a new order every epoch.

    The order of an epoch is a permutation drawn from (seed, epoch). The last batch of an epoch may
    be smaller, so that every example occurs exactly once per epoch.

    Args:
        tensors: tensors with the same first axis, the examples.
        batch_size: examples per batch.
        seed: random seed of the order.
        shuffle: False keeps the order of the tensors.
    """

    def __init__(
        self, tensors: Sequence[Tensor], batch_size: int, seed: int = 0, *, shuffle: bool = True
    ) -> None:
        super().__init__(seed)
        sizes = [len(tensor) for tensor in tensors]
        if not sizes or min(sizes) != max(sizes) or min(sizes) == 0:
            raise ValueError(
                f"tensors must have the same first axis, of at least one example, got lengths "
                f"{sizes}."
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
        """The position, and everything that the order depends on."""
        made_of = {"size": self.size, "batch_size": self.batch_size, "shuffle": self.shuffle}
        return {**super().state_dict(), **made_of, "digest": self._digest}

    @cached_property
    def _digest(self) -> str:
        """A hash of the tensors, so that a run is not resumed with other data."""
        from safetensors.torch import save  # here, so that importing the library needs only torch

        found = hashlib.sha256()
        for tensor in self.tensors:
            found.update(save({"tensor": tensor.detach().contiguous()}))
        return found.hexdigest()[:16]


class StreamBatches(_Cursor):
    """Batches that are generated on demand and never repeat.

    Args:
        make: builds a batch from a CPU generator seeded with (seed, index of the batch).
        seed: random seed of all batches.
    """

    def __init__(self, make: Callable[[torch.Generator], Any], seed: int = 0) -> None:
        super().__init__(seed)
        self.make = make
        self._generator = torch.Generator()

    def batch(self, index: int) -> Any:
        """Batch number ``index``, counted from 0."""
        return self.make(self._generator.manual_seed(derive_seed(self.seed, "batch", index)))


class GrowingBatches(_Cursor):
    """New sequences that get longer as they are learned: a curriculum.

    The first batches have length ``start``. Whenever the loss of a batch falls below ``below``, the
    next one is longer by one, up to ``end``. The length is part of the cursor, so a resumed run
    sees the same batches.

    Args:
        make: builds a batch of sequences of a given length, with a CPU generator as in
            ``StreamBatches``.
        seed: random seed of all batches.
        start: initial length.
        end: final length.
        below: loss below which the length grows.
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
        """Batch number ``index``, counted from 0, at the current length."""
        seeded = self._generator.manual_seed(derive_seed(self.seed, "batch", index))
        return self.make(self.length, seeded)

    def watching(self, loss: Loss) -> Loss:
        """Wrap a loss so that these batches grow as it falls."""

        def watched(model: nn.Module, batch: Any, generator: torch.Generator) -> Any:
            found = loss(model, batch, generator)
            value = found[0] if isinstance(found, tuple) else found
            self.length += value.item() < self.below and self.length < self.end
            return found

        return watched

    def state_dict(self) -> dict[str, Any]:
        """Position and length, and everything that the batches depend on."""
        fixed = {"end": self.end, "below": self.below}
        return {**super().state_dict(), **fixed, "length": self.length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict`` of the same batches."""
        length, self.length = self.length, state["length"]
        try:
            super().load_state_dict(state)
        except ValueError:
            self.length = length
            raise
