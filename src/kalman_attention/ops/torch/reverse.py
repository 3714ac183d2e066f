"""The reverse recursion: exact gradients from scalar adjoints of (mean, variance).

Write m = a mu for the predicted mean and P for the predicted variance. A step computes
r = 1 / (1 + phi P), s' = P r, mu' = r m + s' b; with dmu', ds' the adjoints of the new belief,

    dS   = ds' + b dmu'                     all that depends on s'
    dP   = r^2 (dS - phi m dmu')
    dphi = -s' (s' dS + r m dmu')
    db   = s' dmu'

and dmu = a r dmu', ds = a^2 dP carry on to the token before. The recursion is linear in the
adjoints, so chunks run side by side here too: pull unit adjoints and the local gradients through
every chunk, pass the result from chunk to chunk, then pull the right adjoints through once more.

The composed maps of the forward pass are never differentiated: they tend to rank one, and their
adjoints lose all digits in float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention.filtering import moment
from kalman_attention.filtering.evidence import token_evidence
from kalman_attention.filtering.moment import KLAState
from kalman_attention.ops.contract import CHUNK, ScanGrads, ScanInputs
from kalman_attention.ops.torch.rows import Rows, to_rows


class Step(NamedTuple):
    """What the adjoint of one token needs, ``[R, C, N, D]`` each (for all chunks at once).

    Attributes:
        mean: posterior mean mu'.
        variance: posterior variance s'.
        mean_prev: mean before the token, mu.
        variance_prev: variance before the token, s.
        r: retention; 1 where there is no token.
        phi: precision brought by the token.
        b: information brought by the token.
        real: where there is a token.
    """

    mean: Tensor
    variance: Tensor
    mean_prev: Tensor
    variance_prev: Tensor
    r: Tensor
    phi: Tensor
    b: Tensor
    real: Tensor


class Adjoint(NamedTuple):
    """Gradients by the belief at one point in time, ``[R, C, N, D]`` or ``[R, N, D]``."""

    dmu: Tensor
    ds: Tensor


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
    dtype, zero = rows.v.dtype, torch.zeros_like(rows.state_0.mean)
    last = Adjoint(
        dmu=zero if dmean is None else dmean.to(dtype),
        ds=zero if dvariance is None else dvariance.to(dtype),
    )
    dy_rows = None if dy is None else rows.layout.gather(dy, dtype)
    dy_var_rows = None if dy_var is None else rows.layout.gather(dy_var, dtype)
    if rows.v.shape[1] == 0:
        return _no_tokens(inputs, last)
    steps = _replay(rows, rows.layout.load(checkpoints, dtype))
    sources = [_source(rows, dy_rows, dy_var_rows, steps[t], t) for t in range(CHUNK)]
    incoming, first = _incoming(steps, sources, rows.a_bar, last)
    return _accumulate(inputs, rows, steps, sources, incoming, first, dy_rows, dy_var_rows)


def _replay(rows: Rows, starts: KLAState) -> list[Step]:
    steps, state = [], starts
    for t in range(CHUNK):
        phi, b = token_evidence(rows.k[:, :, t], rows.v[:, :, t], rows.lam_v[:, :, t])
        real = rows.real[:, :, t]
        prior = moment.predict(state, rows.a_bar, rows.p_bar)
        new = moment.update(prior, phi, b)
        new = KLAState(*(torch.where(real, x, y) for x, y in zip(new, state, strict=True)))
        r = moment.retention(prior.variance, phi)
        steps.append(Step(new.mean, new.variance, state.mean, state.variance, r, phi, b, real))
        state = new
    return steps


def _source(rows: Rows, dy: Tensor | None, dy_var: Tensor | None, step: Step, t: int) -> Adjoint:
    """What the outputs of token t add to the adjoint of its belief."""
    q = rows.q[:, :, t].unsqueeze(-1)
    zero = torch.zeros_like(step.mean)
    return Adjoint(
        dmu=zero if dy is None else q * dy[:, :, t].unsqueeze(-2),
        ds=zero if dy_var is None else q * q * dy_var[:, :, t].unsqueeze(-2),
    )


def _pull_back(step: Step, a_bar: Tensor, after: Adjoint) -> tuple[Adjoint, Tensor]:
    """Adjoint before a token from the adjoint after it; also dP, the one of the prediction."""
    m = a_bar * step.mean_prev
    d_variance = after.ds + step.b * after.dmu
    dP = step.r * step.r * (d_variance - step.phi * m * after.dmu)
    before = Adjoint(dmu=a_bar * (step.r * after.dmu), ds=a_bar * (a_bar * dP))
    skip = Adjoint(*(torch.where(step.real, x, y) for x, y in zip(before, after, strict=True)))
    return skip, dP


def _incoming(
    steps: list[Step], sources: list[Adjoint], a_bar: Tensor, last: Adjoint
) -> tuple[Adjoint, Adjoint]:
    """Adjoint that reaches the end of every chunk from later ones, and the one of the start."""
    one, zero = torch.ones_like(steps[0].mean), torch.zeros_like(steps[0].mean)
    local, by_dmu, by_ds = Adjoint(zero, zero), Adjoint(one, zero), Adjoint(zero, one)
    for step, source in zip(reversed(steps), reversed(sources), strict=True):
        local, _ = _pull_back(step, a_bar, _add(local, source))
        by_dmu, _ = _pull_back(step, a_bar, by_dmu)
        by_ds, _ = _pull_back(step, a_bar, by_ds)
    arriving = []
    for c in reversed(range(one.shape[1])):
        arriving.append(last)
        last = Adjoint(
            dmu=by_dmu.dmu[:, c] * last.dmu + local.dmu[:, c],
            ds=by_ds.ds[:, c] * last.ds + by_dmu.ds[:, c] * last.dmu + local.ds[:, c],
        )
    arriving.reverse()
    return Adjoint(*(torch.stack(field, dim=1) for field in zip(*arriving, strict=True))), last


def _accumulate(
    inputs: ScanInputs,
    rows: Rows,
    steps: list[Step],
    sources: list[Adjoint],
    adjoint: Adjoint,
    first: Adjoint,
    dy: Tensor | None,
    dy_var: Tensor | None,
) -> ScanGrads:
    """Walk back once more with the right adjoints and collect what every input gets."""
    a_bar, dtype = rows.a_bar, inputs.compute_dtype
    dv, dlam_v = torch.empty_like(rows.v), torch.empty_like(rows.v)
    dk, dq = torch.empty_like(rows.k), torch.zeros_like(rows.q)
    da, dp = torch.zeros_like(a_bar), torch.zeros_like(a_bar)
    for t in reversed(range(CHUNK)):
        step = steps[t]
        after = _add(adjoint, sources[t])
        adjoint, dP = _pull_back(step, a_bar, after)
        dP = torch.where(step.real, dP, 0.0)
        dmu = torch.where(step.real, after.dmu, 0.0)
        db = step.variance * dmu
        d_variance = torch.where(step.real, after.ds, 0.0) + step.b * dmu
        r_m = step.r * (a_bar * step.mean_prev)
        dphi = -step.variance * (step.variance * d_variance + r_m * dmu)
        da += (step.mean_prev * (step.r * dmu) + 2.0 * a_bar * step.variance_prev * dP).sum((0, 1))
        dp += dP.sum((0, 1))
        k = rows.k[:, :, t].unsqueeze(-1)
        v, lam_v = rows.v[:, :, t].unsqueeze(-2), rows.lam_v[:, :, t].unsqueeze(-2)
        k_db = (k * db).sum(-2)
        dv[:, :, t] = rows.lam_v[:, :, t] * k_db
        dlam_v[:, :, t] = (k * k * dphi).sum(-2) + rows.v[:, :, t] * k_db
        dk[:, :, t] = (lam_v * (2.0 * k * dphi + v * db)).sum(-1)
        if dy is not None:
            dq[:, :, t] += (step.mean * dy[:, :, t].unsqueeze(-2)).sum(-1)
        if dy_var is not None:
            two_q = 2.0 * rows.q[:, :, t]
            dq[:, :, t] += two_q * (step.variance * dy_var[:, :, t].unsqueeze(-2)).sum(-1)
    dq = dq * rows.real.flatten(3)
    back = rows.layout.scatter
    return ScanGrads(
        q=back(dq, inputs.q),
        k=back(dk, inputs.k),
        v=back(dv, inputs.v),
        lam_v=back(dlam_v, inputs.lam_v),
        a_bar=da.to(dtype),
        p_bar=dp.to(dtype),
        mean_0=first.dmu.to(dtype, copy=True),
        variance_0=first.ds.to(dtype, copy=True),
    )


def _add(x: Adjoint, y: Adjoint) -> Adjoint:
    return Adjoint(x.dmu + y.dmu, x.ds + y.ds)


def _no_tokens(inputs: ScanInputs, last: Adjoint) -> ScanGrads:
    """Without tokens the last belief is the first one and nothing else takes part."""
    q, k, v, lam_v, a_bar, p_bar = (torch.zeros_like(x) for x in inputs[:6])
    return ScanGrads(q, k, v, lam_v, a_bar, p_bar, last.dmu.clone(), last.ds.clone())
