"""Packed documents as padded rows, for mixers that know padding but not packing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kalman_attention._typing import Mask
from kalman_attention.nn.mixer import LayerOutput


def mix_documents(
    mix: Callable[[Tensor, Any, Mask], LayerOutput],
    x: Tensor,
    state: Any,
    cu_seqlens: Tensor,
) -> LayerOutput:
    """Unpack the documents into rows, mix, and pack them again.

    Args:
        mix: a mixer: tokens ``[n, longest, d_model]``, states, mask to output.
        x: documents one after the other, ``[1, T, d_model]``.
        state: one row per document, or None.
        cu_seqlens: borders of the n documents, ``[n + 1]`` int.

    Returns:
        The output in the layout of x, with one state per document.
    """
    bounds = cu_seqlens.to(device=x.device, dtype=torch.int64)
    lengths = bounds.diff()
    offset = torch.arange(int(lengths.max()), device=x.device)
    real = offset < lengths.unsqueeze(1)  # [n, longest]
    place = torch.where(real, bounds[:-1].unsqueeze(1) + offset, 0)
    rows = x[0][place] if x.shape[1] else x.new_zeros(*place.shape, x.shape[2])
    found = mix(rows, state, real)
    return LayerOutput(found.y[real].unsqueeze(0), None, found.state)
