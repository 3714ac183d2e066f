"""Batches as trees of tensors: tuples, lists and dictionaries."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """The same tree with all tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def named_tensors(batch: Any, prefix: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a tree, with their places as names."""
    if isinstance(batch, Tensor):
        yield prefix, batch
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from named_tensors(value, f"{prefix}.{key}")
    elif isinstance(batch, (tuple, list)):
        for i, value in enumerate(batch):
            yield from named_tensors(value, f"{prefix}.{i}")
