"""Smoothing in parallel over chunks, in plain torch operations that autograd differentiates.

The five numbers of a segment contain what its tokens say about the latent before it, so one summary
per chunk serves both directions: prefixes give the initial belief of a chunk, suffixes the
likelihood of all tokens after it. Given both, all chunks are filtered forwards and smoothed
backwards in parallel.
"""

import torch

from kalman_attention.filtering import moment
from kalman_attention.filtering.blocks import block_evidence, from_blocks, read_blocks
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.segment import FilterMap
from kalman_attention.filtering.smoothing import Future, smooth, step_back
from kalman_attention.ops.contract import CHUNK, ScanInputs, ScanOutput, where
from kalman_attention.ops.torch.prefix_scan import prefix_scan
from kalman_attention.ops.torch.rows import Rows, to_rows
from kalman_attention.ops.torch.segments import chunk_filters, chunk_starts


def smooth_rows(inputs: ScanInputs) -> ScanOutput:
    """Read the belief at each token given all tokens of its row."""
    rows = to_rows(inputs)
    maps = chunk_filters(rows)
    filtered = _filter(rows, chunk_starts(maps, rows.state_0))
    last = KLAState(*(x[:, -1] for x in filtered[-1])) if rows.v.shape[1] else rows.state_0
    y, y_var = _walk_back(rows, filtered, chunk_futures(maps))
    dtype = inputs.compute_dtype
    return ScanOutput(
        y=rows.layout.scatter(y, inputs.v),
        y_var=rows.layout.scatter(y_var, inputs.v),
        state=KLAState(*(x.to(dtype) for x in from_blocks(last))),
    )


def chunk_futures(maps: FilterMap) -> Future:
    """Likelihood of the tokens after every chunk, ``[R, C, G, m, D]``, from later maps."""
    nothing = Future(J=torch.zeros_like(maps.J[:, :1]), eta=torch.zeros_like(maps.eta[:, :1]))
    if maps.J.shape[1] < 2:
        return nothing._replace(J=torch.zeros_like(maps.J), eta=torch.zeros_like(maps.eta))
    after = FilterMap(*(x[:, 1:].flip(1) for x in maps))  # last chunk first
    suffixes = prefix_scan(lambda earlier, later: later.compose(earlier), after)
    return Future(
        J=torch.cat([suffixes.J.flip(1), nothing.J], dim=1),
        eta=torch.cat([suffixes.eta.flip(1), nothing.eta], dim=1),
    )


def _filter(rows: Rows, starts: KLAState) -> list[KLAState]:
    """Beliefs after token t of every chunk, for t = 0 to CHUNK - 1."""
    state, filtered = starts, []
    for t in range(CHUNK):
        phi, b = block_evidence(rows.k[:, :, t], rows.v[:, :, t], rows.lam_v[:, :, t])
        state = where(rows.real[:, :, t], moment.step(state, *rows.dynamics(t), phi, b), state)
        filtered.append(state)
    return filtered


def _walk_back(
    rows: Rows, filtered: list[KLAState], future: Future
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smoothed read-outs ``[R, C, CHUNK, D]``, given the likelihood of what follows each chunk."""
    y, y_var = [], []
    for t in reversed(range(CHUNK)):
        mean, variance = read_blocks(rows.q[:, :, t], smooth(filtered[t], future))
        y.append(mean)
        y_var.append(variance)
        phi, b = block_evidence(rows.k[:, :, t], rows.v[:, :, t], rows.lam_v[:, :, t])
        future = where(rows.real[:, :, t], step_back(future, *rows.dynamics(t), phi, b), future)
    return torch.stack(y[::-1], 2), torch.stack(y_var[::-1], 2)
