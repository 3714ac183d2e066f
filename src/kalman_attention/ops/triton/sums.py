"""Sums over programs, in the order of their numbers: the second pass of every reduction."""

import torch
import triton.language as tl
from torch import Tensor

from kalman_attention.ops.triton.launch import OPTIONS
from kalman_attention.ops.triton.place import kernel
from kalman_attention.ops.triton.schedule import ceil

COLUMNS = 128
"""Sums of one program, four per thread."""


@kernel
def sum_kernel(partial, out, rows, columns, BLOCK: tl.constexpr):
    """Add up the rows of [rows, columns] one after the other."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    has = column < columns
    total = tl.full((BLOCK,), 0.0, partial.dtype.element_ty)
    here = partial + column
    for _ in range(0, rows):
        total += tl.load(here, mask=has, other=0.0)
        here += columns
    tl.store(out + column, total, mask=has)


def add_up(partial: Tensor, like: Tensor) -> Tensor:
    """Sum over the first axis, in the shape and dtype of ``like``."""
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    columns = out.numel()
    if columns:
        grid = (ceil(columns, COLUMNS),)
        sum_kernel[grid](partial, out, len(partial), columns, COLUMNS, **OPTIONS)
    return out
