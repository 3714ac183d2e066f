"""Batches as trees of tensors, and the share of a batch that a rank processes."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


def map_tensors(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply a function to all tensors of a tree of tuples, lists and dictionaries."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(change, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(change, value) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(change, value) for value in batch)
    return batch


def named_tensors(batch: Any, prefix: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Iterate over all tensors of a tree, named by their position in it."""
    if isinstance(batch, Tensor):
        yield prefix, batch
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from named_tensors(value, f"{prefix}.{key}")
    elif isinstance(batch, (tuple, list)):
        for i, value in enumerate(batch):
            yield from named_tensors(value, f"{prefix}.{i}")


def to_device(batch: Any, device: torch.device) -> Any:
    """Move all tensors of a tree to a device."""
    return map_tensors(lambda x: x.to(device, non_blocking=True), batch)


class Share(NamedTuple):
    """The rows of a batch that a rank processes.

    Attributes:
        batch: a batch of the same form.
        rows: number of rows that count. It is 0 if there are fewer rows than ranks and none is left
            for this rank, which then processes a row of another.
    """

    batch: Any
    rows: int


def share_rows(batch: Any, index: int, count: int) -> Share:
    """Rows of a batch for one of ``count`` ranks; shares differ by at most one row.

    Args:
        batch: a batch whose tensors all have the rows as first axis.
        index: index of the rank.
        count: number of ranks.
    """
    sizes = {name: x.shape[0] if x.dim() else None for name, x in named_tensors(batch)}
    if not sizes or None in sizes.values() or len(set(sizes.values())) > 1:
        found = ", ".join(f"{name}: {size}" for name, size in sizes.items()) or "no tensor at all"
        raise ValueError(
            "a batch that is divided over ranks must consist of tensors with the same first axis, "
            f"got {found}."
        )
    rows = next(iter(sizes.values())) or 0
    begin, end = (rows * i // count for i in (index, index + 1))
    # A rank without rows still has to take part in every exchange.
    taken = slice(begin, end) if end > begin else slice(0, 1)
    return Share(map_tensors(lambda x: x[taken], batch), end - begin)


def piece(x: Tensor, index: int, count: int) -> Tensor:
    """The piece of ``[B, T, ...]`` that a rank holds if sequences are split; may be empty."""
    T = x.shape[1]
    return x[:, T * index // count : T * (index + 1) // count]
