"""Summaries of whole rows, for callers that cut time themselves, such as machines.

An engine may have its own (``Engine.maps``); the others get what is here: plain torch operations on
any device, all chunks of 64 tokens at once, without ever holding ``[B, T, N, D]``.
"""

from typing import TypeVar

import torch
from torch import Tensor

from kalman_attention.filtering import moment
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.stretch import AdjointMap, FilterMap
from kalman_attention.ops.contract import CHUNK, ScanInputs
from kalman_attention.ops.engines import ENGINES
from kalman_attention.ops.torch.rows import Rows, to_rows

Map = TypeVar("Map", FilterMap, AdjointMap)


def filter_map(inputs: ScanInputs, engine: str) -> FilterMap:
    """What the tokens of every row do to the belief before them.

    Args:
        inputs: of a scan; q and the belief are not read.
        engine: whose arithmetic to use.

    Returns:
        Entries ``[R, N, D]`` in the compute dtype.
    """
    if ENGINES[engine].maps:
        return ENGINES[engine].load_maps().filter_map(inputs)
    rows = to_rows(inputs)
    found = _combined(_chunk_filters(rows), rows.state_0.mean)
    return FilterMap(*(x.to(inputs.compute_dtype) for x in found))


def adjoint_map(
    inputs: ScanInputs,
    checkpoints: Tensor,
    dy: Tensor | None,
    dy_var: Tensor | None,
    engine: str,
) -> AdjointMap:
    """What the tokens of every row do to the gradients by the belief after them.

    Args:
        inputs: of the scan.
        checkpoints: what it saved.
        dy: gradient by y, or None for 0.
        dy_var: gradient by y_var, or None for 0.
        engine: whose arithmetic to use.

    Returns:
        Entries ``[R, N, D]`` in the compute dtype.
    """
    if ENGINES[engine].maps:
        return ENGINES[engine].load_maps().adjoint_map(inputs, checkpoints, dy, dy_var)
    rows = to_rows(inputs)
    dtype = rows.v.dtype
    sources = [None if g is None else rows.layout.gather(g, dtype) for g in (dy, dy_var)]
    maps = _chunk_adjoints(rows, rows.layout.load(checkpoints, dtype), *sources)
    found = _combined(maps, rows.state_0.mean)
    return AdjointMap(*(x.to(inputs.compute_dtype) for x in found))


def _chunk_filters(rows: Rows) -> FilterMap:
    """Maps of all chunks, ``[R, C, N, D]``."""
    R, C, _, N = rows.k.shape
    total = FilterMap.identity_like(rows.v.new_empty(R, C, N, rows.v.shape[-1]))
    for t in range(CHUNK):
        phi, b = token_evidence(rows.k[:, :, t], rows.v[:, :, t], rows.lam_v[:, :, t])
        total = _where(rows.real[:, :, t], total.then(rows.a_bar, rows.p_bar, phi, b), total)
    return total


def _chunk_adjoints(
    rows: Rows, starts: KLAState, dy: Tensor | None, dy_var: Tensor | None
) -> AdjointMap:
    """Maps of all chunks, ``[R, C, N, D]``, with the filter running along from their beliefs."""
    state, a_bar = starts, rows.a_bar
    total = AdjointMap.identity_like(starts.mean)
    zero = torch.zeros_like(starts.mean)
    for t in range(CHUNK):
        phi, b = token_evidence(rows.k[:, :, t], rows.v[:, :, t], rows.lam_v[:, :, t])
        q, real = rows.q[:, :, t].unsqueeze(-1), rows.real[:, :, t]
        prior = moment.predict(state, a_bar, rows.p_bar)
        r = moment.retention(prior.variance, phi)
        dmu = zero if dy is None else q * dy[:, :, t].unsqueeze(-2)
        ds = zero if dy_var is None else q * q * dy_var[:, :, t].unsqueeze(-2)
        total = _where(real, total.then(a_bar, r, b - phi * prior.mean, dmu, ds), total)
        new = moment.update(prior, phi, b)
        state = KLAState(*(torch.where(real, x, y) for x, y in zip(new, state, strict=True)))
    return total


def _combined(maps: Map, like: Tensor) -> Map:
    """One map of all chunks, ``[R, N, D]``: neighbours in pairs, until one is left."""
    if maps.gain.shape[1] == 0:
        return type(maps).identity_like(like)
    while (C := maps.gain.shape[1]) > 1:
        first, second = (type(maps)(*(x[:, i : C - C % 2 : 2] for x in maps)) for i in (0, 1))
        pairs = second.compose(first)
        rest = (x[:, C - C % 2 :] for x in maps)
        maps = type(maps)(*(torch.cat(both, 1) for both in zip(pairs, rest, strict=True)))
    return type(maps)(*(x[:, 0] for x in maps))


def _where(real: Tensor, new: Map, old: Map) -> Map:
    return type(new)(*(torch.where(real, x, y) for x, y in zip(new, old, strict=True)))
