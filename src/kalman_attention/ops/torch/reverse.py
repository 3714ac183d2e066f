"""The reverse recursion: exact gradients from scalar adjoints of (mean, variance).

Write m = a mu for the predicted mean, P for the predicted variance and e = b - phi m for the
innovation. A step computes r = 1 / (1 + phi P), s' = P r, mu' = r m + s' b; with dmu', ds' the
adjoints of the new belief,

    dP   = r^2 (ds' + sum e dmu')
    dphi = -s' (s' ds' + sum mu' dmu')
    db   = s' dmu'

and dmu = a r dmu', ds = a^2 dP go on to the previous token. The gradient with respect to lam_v is
the sum of |k|^2 dphi and k v db over slots; the two cancel under strong evidence, so it is computed
as the sum of s' (o dmu' - |k|^2 s' ds') with o = r (k v - |k|^2 m) = k v - |k|^2 mu'. Sums are over
the slots of a block, which share s, r and phi; with one slot per block there is nothing to sum.

The recursion is affine in the adjoints, so chunks run in parallel here too: find the adjoint map of
every chunk, pass the adjoint from chunk to chunk, then pull what arrives back through each chunk.

The composed maps of the forward pass are never differentiated: they tend to rank one, and their
adjoints lose all digits in float32.
"""

import torch
from torch import Tensor

from kalman_attention.filtering.blocks import from_blocks
from kalman_attention.filtering.gaps import transition_adjoint
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.segment import AdjointMap
from kalman_attention.ops.contract import CHUNK, ScanGrads, ScanInputs
from kalman_attention.ops.torch.rows import Rows, end_gradients, to_rows
from kalman_attention.ops.torch.segments import Adjoint, Step, chunk_adjoints, replay, sources


def backward(
    inputs: ScanInputs,
    checkpoints: Tensor,
    dy: Tensor | None,
    dy_var: Tensor | None,
    dmean: Tensor | None,
    dvariance: Tensor | None,
) -> ScanGrads:
    """Exact gradients of one scan; see ``EngineModule.backward``."""
    rows = to_rows(inputs)
    dtype = rows.v.dtype
    last = Adjoint(*end_gradients(inputs, dmean, dvariance, dtype))
    if rows.v.shape[1] == 0:
        return _no_tokens(inputs, last)
    dy_rows = None if dy is None else rows.layout.gather(dy, dtype)
    dy_var_rows = None if dy_var is None else rows.layout.gather(dy_var, dtype)
    starts = rows.layout.load(checkpoints, dtype)
    # Held for all chunks at once: the backward pass of the torch engines needs O(T N D) memory.
    steps = list(replay(rows, starts))
    added = list(sources(rows, dy_rows, dy_var_rows))
    maps = chunk_adjoints(steps, added, starts)
    incoming, first = _incoming(maps, last)
    return _accumulate(inputs, rows, steps, added, incoming, first, dy_rows, dy_var_rows)


def _incoming(maps: AdjointMap, last: Adjoint) -> tuple[Adjoint, Adjoint]:
    """Adjoint that arrives at the end of every chunk, and that of the initial belief."""
    arriving = []
    for c in reversed(range(maps.gain.shape[1])):
        arriving.append(last)
        last = Adjoint(*AdjointMap(*(x[:, c] for x in maps)).apply(*last))
    arriving.reverse()
    return Adjoint(*(torch.stack(field, dim=1) for field in zip(*arriving, strict=True))), last


def _pull_back(step: Step, after: Adjoint) -> tuple[Adjoint, Tensor]:
    """Adjoint before a token from the adjoint after it; also dP, that of the prediction."""
    dP = step.r * (step.r * (after.ds + _per_block(step.e * after.dmu)))
    before = Adjoint(dmu=step.a * (step.r * after.dmu), ds=step.a * (step.a * dP))
    skip = Adjoint(*(torch.where(step.real, x, y) for x, y in zip(before, after, strict=True)))
    return skip, dP


def _accumulate(
    inputs: ScanInputs,
    rows: Rows,
    steps: list[Step],
    added: list[Adjoint],
    adjoint: Adjoint,
    first: Adjoint,
    dy: Tensor | None,
    dy_var: Tensor | None,
) -> ScanGrads:
    """Walk back once more, with the adjoints that arrive, and collect all gradients."""
    dtype = inputs.compute_dtype
    dv, dlam_v = torch.empty_like(rows.v), torch.empty_like(rows.v)
    dk, dq = torch.empty_like(rows.k), torch.zeros_like(rows.q)
    da, dp = torch.zeros_like(rows.a_bar), torch.zeros_like(rows.a_bar)
    ddt = None if rows.dt is None else torch.empty_like(rows.dt)
    for t in reversed(range(CHUNK)):
        step = steps[t]
        after = _add(adjoint, added[t])
        adjoint, dP = _pull_back(step, after)
        # Padding contributes nothing, and its place may hold values of another chunk.
        dP = torch.where(step.real, dP, 0.0)
        dmu = torch.where(step.real, after.dmu, 0.0)
        ds = torch.where(step.real, after.ds, 0.0)
        db = step.variance * dmu
        s_ds = step.variance * ds
        dphi = -step.variance * (s_ds + _per_block(step.mean * dmu))
        da_t = _per_block(step.mean_prev * (step.r * dmu))
        da_t = da_t + 2.0 * step.a * step.variance_prev * dP
        if rows.dt is not None and ddt is not None:
            gap = rows.dt[:, :, t].unsqueeze(-2)
            da_t, dP, of_blocks = transition_adjoint(rows.a_bar, rows.p_bar, gap, da_t, dP)
            ddt[:, :, t] = of_blocks.sum(-2)
        da += da_t.sum((0, 1))
        dp += dP.sum((0, 1))
        k = rows.k[:, :, t].unsqueeze(-1)
        v, lam_v = rows.v[:, :, t, None, None, :], rows.lam_v[:, :, t, None, None, :]
        dv[:, :, t] = rows.lam_v[:, :, t] * (k * db).sum((-3, -2))
        of_slots = step.variance * (step.rest * dmu)
        dlam_v[:, :, t] = (_per_block(of_slots) - _per_block(k * k) * step.variance * s_ds).sum(
            (-3, -2)
        )
        dk[:, :, t] = (lam_v * (2.0 * k * dphi + v * db)).sum(-1)
        if dy is not None:
            dq[:, :, t] += (step.mean * dy[:, :, t, None, None, :]).sum(-1)
        if dy_var is not None:
            two_q = 2.0 * rows.q[:, :, t]
            dq[:, :, t] += two_q * (step.variance * dy_var[:, :, t, None, None, :]).sum(-1)
    dq = dq * rows.real.squeeze(-1)
    back, start = rows.layout.scatter, from_blocks(KLAState(*first))
    return ScanGrads(
        q=back(dq.flatten(-2), inputs.q),
        k=back(dk.flatten(-2), inputs.k),
        v=back(dv, inputs.v),
        lam_v=back(dlam_v, inputs.lam_v),
        a_bar=da.squeeze(-2).to(dtype),
        p_bar=dp.squeeze(-2).to(dtype),
        mean_0=start.mean.to(dtype, copy=True),
        variance_0=start.variance.to(dtype, copy=True),
        dt=None if ddt is None or inputs.dt is None else back(ddt, inputs.dt),
    )


def _per_block(x: Tensor) -> Tensor:
    """Sum over the slots of every block."""
    return x.sum(-2, keepdim=True)


def _add(x: Adjoint, y: Adjoint) -> Adjoint:
    return Adjoint(x.dmu + y.dmu, x.ds + y.ds)


def _no_tokens(inputs: ScanInputs, last: Adjoint) -> ScanGrads:
    """Without tokens the final belief is the initial one, and all other gradients are 0."""
    q, k, v, lam_v, a_bar, p_bar = (torch.zeros_like(x) for x in inputs[:6])
    dt = None if inputs.dt is None else torch.zeros_like(inputs.dt)
    first = from_blocks(KLAState(*last))
    start = first.mean.clone(), first.variance.clone()
    return ScanGrads(q, k, v, lam_v, a_bar, p_bar, start[0], start[1], dt)
