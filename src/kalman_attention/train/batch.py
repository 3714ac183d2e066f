"""Batches as trees of tensors: tuples, lists and dictionaries."""

from typing import Any

import torch

from kalman_attention.parallel.batch import map_tensors
from kalman_attention.parallel.batch import named_tensors as named_tensors


def to_device(batch: Any, device: torch.device) -> Any:
    """The same tree with all tensors on a device."""
    return map_tensors(lambda x: x.to(device, non_blocking=True), batch)
