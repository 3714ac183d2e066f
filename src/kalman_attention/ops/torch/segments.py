"""Chunks and rows as segments of ``filtering/segment.py``: their summaries and their steps.

All chunks of 64 tokens run in parallel, token by token, without ever holding ``[B, T, N, D]``. The
engines of this folder split time by these summaries. ``filter_map`` and ``adjoint_map`` give the
summaries of whole rows to callers that split time themselves, for example over machines, on behalf
of every engine that has none of its own. ``replay`` repeats the steps of a scan from the beliefs
that it saved, for a backward pass.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kalman_attention.filtering import moment
from kalman_attention.filtering.blocks import block_evidence
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.segment import AdjointMap, FilterMap
from kalman_attention.ops.contract import CHUNK, ScanInputs, where
from kalman_attention.ops.torch.prefix_scan import prefix_scan
from kalman_attention.ops.torch.rows import Rows, to_rows

Map = TypeVar("Map", FilterMap, AdjointMap)


class Step(NamedTuple):
    """What the adjoint of one token needs, ``[R, C, G, m, D]``, for all chunks at once.

    Quantities that the slots of a block share are ``[R, C, G, 1, D]``.

    Attributes:
        mean: posterior mean mu'.
        variance: posterior variance s'.
        mean_prev: mean before the token, mu.
        variance_prev: variance before the token, s.
        a: decay of the step to the token.
        r: retention.
        e: innovation of the token, b - phi a mu.
        rest: residual of the value after the update, k v - |k|^2 mu'.
        real: True at real tokens.
    """

    mean: Tensor
    variance: Tensor
    mean_prev: Tensor
    variance_prev: Tensor
    a: Tensor
    r: Tensor
    e: Tensor
    rest: Tensor
    real: Tensor


class Adjoint(NamedTuple):
    """Gradients of the belief at one point in time, ``[R, C, G, m, D]`` or ``[R, G, m, D]``."""

    dmu: Tensor
    ds: Tensor


def replay(rows: Rows, starts: KLAState) -> Iterator[Step]:
    """The steps of all chunks in parallel, token by token, from their initial beliefs."""
    state = starts
    for t in range(CHUNK):
        phi, b = block_evidence(rows.k[:, :, t], rows.v[:, :, t], rows.lam_v[:, :, t])
        real = rows.real[:, :, t]
        a, p = rows.dynamics(t)
        prior = moment.predict(state, a, p)
        new = moment.update(prior, phi, b)
        new = KLAState(*(torch.where(real, x, y) for x, y in zip(new, state, strict=True)))
        r = moment.retention(prior.variance, phi)
        e = moment.innovation(prior.mean, phi, b)
        k = rows.k[:, :, t].unsqueeze(-1)
        k2 = (k * k).sum(-2, keepdim=True)
        # r (k v - k^2 m) instead of k v - k^2 mu': the two terms agree under strong evidence.
        rest = r * (k * rows.v[:, :, t, None, None, :] - k2 * prior.mean)
        yield Step(new.mean, new.variance, state.mean, state.variance, a, r, e, rest, real)
        state = new


def sources(rows: Rows, dy: Tensor | None, dy_var: Tensor | None) -> Iterator[Adjoint]:
    """What the outputs of every token add to the adjoint of its belief."""
    zero = rows.v.new_zeros(())
    for t in range(CHUNK):
        q = rows.q[:, :, t].unsqueeze(-1)
        q2 = (q * q).sum(-2, keepdim=True)
        yield Adjoint(
            dmu=zero if dy is None else q * dy[:, :, t, None, None, :],
            ds=zero if dy_var is None else q2 * dy_var[:, :, t, None, None, :],
        )


def filter_map(inputs: ScanInputs) -> FilterMap:
    """The map from the belief before every row to the belief after it.

    Args:
        inputs: inputs of a scan; q and the belief are not read.

    Returns:
        Entries ``[R, N, D]`` (shared ones ``[R, G, D]``) in the compute dtype.
    """
    rows = to_rows(inputs)
    found = _combined(chunk_filters(rows), rows.state_0)
    return FilterMap(*(x.flatten(1, 2).to(inputs.compute_dtype) for x in found))


def adjoint_map(
    inputs: ScanInputs, checkpoints: Tensor, dy: Tensor | None, dy_var: Tensor | None
) -> AdjointMap:
    """The map from gradients with respect to the belief after every row to those before it.

    Args:
        inputs: inputs of the scan.
        checkpoints: the beliefs that it saved.
        dy: gradient with respect to y; None means 0.
        dy_var: gradient with respect to y_var; None means 0.

    Returns:
        Entries ``[R, N, D]`` (shared ones ``[R, G, D]``) in the compute dtype.
    """
    rows = to_rows(inputs)
    dtype = rows.v.dtype
    dy, dy_var = (None if g is None else rows.layout.gather(g, dtype) for g in (dy, dy_var))
    starts = rows.layout.load(checkpoints, dtype)
    added = sources(rows, dy, dy_var)
    maps = chunk_adjoints(replay(rows, starts), added, starts)
    found = _combined(maps, rows.state_0)
    return AdjointMap(*(x.flatten(1, 2).to(inputs.compute_dtype) for x in found))


def chunk_filters(rows: Rows) -> FilterMap:
    """Maps of all chunks, ``[R, C, G, m, D]``."""
    C = rows.k.shape[1]
    like = (x.unsqueeze(1).expand(-1, C, -1, -1, -1) for x in rows.state_0)
    total = FilterMap.identity_like(KLAState(*like))
    for t in range(CHUNK):
        phi, b = block_evidence(rows.k[:, :, t], rows.v[:, :, t], rows.lam_v[:, :, t])
        total = where(rows.real[:, :, t], total.then(*rows.dynamics(t), phi, b), total)
    return total


def chunk_starts(maps: FilterMap, state_0: KLAState) -> KLAState:
    """Belief before every chunk, ``[R, C, G, m, D]``, from the maps of the chunks before it."""
    mean_0, variance_0 = (x.unsqueeze(1) for x in state_0)
    if maps.gain.shape[1] < 2:
        return KLAState(mean_0.expand_as(maps.mu), variance_0.expand_as(maps.s))
    before = FilterMap(*(x[:, :-1] for x in maps))
    reached = prefix_scan(FilterMap.compose, before).apply(KLAState(mean_0, variance_0))
    return KLAState(
        mean=torch.cat([mean_0, reached.mean], dim=1),
        variance=torch.cat([variance_0, reached.variance], dim=1),
    )


def chunk_adjoints(steps: Iterable[Step], added: Iterable[Adjoint], starts: KLAState) -> AdjointMap:
    """Maps of all chunks, ``[R, C, G, m, D]``, from their steps and what their outputs add."""
    total = AdjointMap.identity_like(starts)
    for step, own in zip(steps, added, strict=True):
        total = where(step.real, total.then(step.a, step.r, step.e, own.dmu, own.ds), total)
    return total


def _combined(maps: Map, like: KLAState) -> Map:
    """One map of all chunks, ``[R, G, m, D]``: combine neighbours in pairs until one is left."""
    if maps.gain.shape[1] == 0:
        return type(maps).identity_like(like)
    while (C := maps.gain.shape[1]) > 1:  # an odd last map waits for the next round
        first, second = (type(maps)(*(x[:, i : C - C % 2 : 2] for x in maps)) for i in (0, 1))
        pairs = second.compose(first)
        rest = (x[:, C - C % 2 :] for x in maps)
        maps = type(maps)(*(torch.cat(both, 1) for both in zip(pairs, rest, strict=True)))
    return type(maps)(*(x[:, 0] for x in maps))
