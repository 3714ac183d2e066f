"""Engine ``associative``: the parallel scan in plain torch operations, on any device.

Time is divided into chunks that run in parallel. Each chunk is summarised by five numbers per slot
and channel (``filtering/segment.py``), a prefix scan over the summaries gives every chunk its
initial belief, and an exact replay from there gives the outputs. Work is O(T), and ``[B, T, N, D]``
is never held in the forward pass.
"""

import torch
from torch import Tensor

from kalman_attention.filtering import moment
from kalman_attention.filtering.blocks import block_evidence, from_blocks, read_blocks
from kalman_attention.filtering.moment import KLAState
from kalman_attention.ops.contract import CHUNK, ScanGrads, ScanInputs, ScanResult, where
from kalman_attention.ops.torch import reverse
from kalman_attention.ops.torch.rows import Rows, to_rows
from kalman_attention.ops.torch.segments import chunk_filters, chunk_starts


def forward(inputs: ScanInputs, *, return_variance: bool, save: bool) -> ScanResult:
    """Summarise the chunks, scan the summaries, replay the chunks."""
    rows = to_rows(inputs)
    starts = chunk_starts(chunk_filters(rows), rows.state_0)
    y, y_var, ends = _replay(rows, starts, return_variance)
    last = KLAState(*(x[:, -1] for x in ends)) if rows.v.shape[1] else rows.state_0
    last, dtype = from_blocks(last), inputs.compute_dtype
    return ScanResult(
        y=rows.layout.scatter(y, inputs.v),
        y_var=None if y_var is None else rows.layout.scatter(y_var, inputs.v),
        mean=last.mean.to(dtype, copy=True),
        variance=last.variance.to(dtype, copy=True),
        checkpoints=rows.layout.save(starts, dtype) if save else None,
    )


def backward(
    inputs: ScanInputs,
    checkpoints: Tensor,
    dy: Tensor | None,
    dy_var: Tensor | None,
    dmean: Tensor | None,
    dvariance: Tensor | None,
) -> ScanGrads:
    """Exact gradients by the reverse recursion, parallel over chunks like the forward pass."""
    return reverse.backward(inputs, checkpoints, dy, dy_var, dmean, dvariance)


def _replay(
    rows: Rows, starts: KLAState, return_variance: bool
) -> tuple[Tensor, Tensor | None, KLAState]:
    """Filter every chunk from its initial belief: outputs ``[R, C, CHUNK, D]``, final beliefs."""
    y = torch.empty_like(rows.v)
    y_var = torch.empty_like(rows.v) if return_variance else None
    state = starts  # [R, C, G, m, D]: all chunks advance together
    for t in range(CHUNK):
        phi, b = block_evidence(rows.k[:, :, t], rows.v[:, :, t], rows.lam_v[:, :, t])
        state = where(rows.real[:, :, t], moment.step(state, *rows.dynamics(t), phi, b), state)
        y[:, :, t], spread = read_blocks(rows.q[:, :, t], state)
        if y_var is not None:
            y_var[:, :, t] = spread
    return y, y_var, state
