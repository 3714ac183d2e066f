"""The definition of the op: a readable loop over time, differentiated by autograd.

The step is the paper's filter in moment form. (The information form is the same filter, as a test
shows, but its precision overflows like a_bar^(-2t) when there is no process noise, so that it
cannot be the yardstick for 65,536 tokens.)
"""

import itertools

import torch
from torch import Tensor

from kalman_attention._typing import Dynamics, Keys, Mask, Precisions, Values
from kalman_attention.filtering import moment
from kalman_attention.filtering.evidence import token_evidence, without_gaps
from kalman_attention.filtering.gaps import transition
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.readout import read_mean, read_variance
from kalman_attention.ops.checks import check_bounds, check_scan, check_step
from kalman_attention.ops.contract import ScanInputs, ScanOutput


def kla_scan_ref(
    q: Keys,
    k: Keys,
    v: Values,
    lam_v: Precisions,
    a_bar: Dynamics,
    p_bar: Dynamics,
    *,
    dt: Tensor | None = None,
    state: KLAState | None = None,
    mask: Mask | None = None,
    cu_seqlens: Tensor | None = None,
    return_variance: bool = False,
    acc_dtype: torch.dtype | None = None,
) -> ScanOutput:
    """Kalman linear attention, token by token. Arguments and result as for ``kla_scan``."""
    inputs = check_scan(q, k, v, lam_v, a_bar, p_bar, state, mask, cu_seqlens, acc_dtype, dt)
    return reference_scan(inputs, return_variance=return_variance)


def reference_scan(inputs: ScanInputs, *, return_variance: bool) -> ScanOutput:
    """The loop on validated arguments; each packed document is a loop of its own."""
    if inputs.cu_seqlens is None:
        return _rows(inputs, return_variance)
    documents = []
    bounds = check_bounds(inputs.cu_seqlens, inputs.v.shape[1])
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        q, k, v, lam_v = (x[:, start:end] for x in inputs[:4])
        document = inputs._replace(
            q=q, k=k, v=v, lam_v=lam_v,
            mean_0=inputs.mean_0[i : i + 1], variance_0=inputs.variance_0[i : i + 1],
            cu_seqlens=None, dt=None if inputs.dt is None else inputs.dt[:, start:end],
        )  # fmt: skip
        documents.append(_rows(document, return_variance))
    variances = [d.y_var for d in documents if d.y_var is not None]
    return ScanOutput(
        y=torch.cat([d.y for d in documents], 1),
        y_var=torch.cat(variances, 1) if variances else None,
        state=KLAState(*(torch.cat(x) for x in zip(*(d.state for d in documents), strict=True))),
    )


def _rows(inputs: ScanInputs, return_variance: bool) -> ScanOutput:
    dtype, out_dtype = inputs.arithmetic_dtype, inputs.v.dtype
    q, k, v, lam_v, a_bar, p_bar, *belief = (x.to(dtype) for x in inputs[:8])
    if inputs.mask is not None:
        # Whatever stands in padding, even NaN, must not reach a gradient.
        q, k, v, lam_v = (x.masked_fill(~inputs.mask.unsqueeze(-1), 0.0) for x in (q, k, v, lam_v))
    v = without_gaps(v, lam_v)
    state = KLAState(*belief)
    gaps = None if inputs.dt is None else _gaps(inputs.dt, inputs.mask, dtype).unbind(1)
    y, y_var = [v[:, :0]], [v[:, :0]]
    # unbind, not x[:, t]: the gradient of an index is as long as T, and there are T of them.
    tokens = zip(*(x.unbind(1) for x in (q, k, v, lam_v)), strict=True)
    for t, (q_t, k_t, v_t, lam_v_t) in enumerate(tokens):
        phi, b = token_evidence(k_t, v_t, lam_v_t)
        step = (a_bar, p_bar) if gaps is None else transition(a_bar, p_bar, gaps[t])
        new = moment.step(state, *step, phi, b)
        if inputs.mask is not None:
            real = inputs.mask[:, t, None, None]
            new = KLAState(*(torch.where(real, x, y) for x, y in zip(new, state, strict=True)))
        state = new
        y.append(read_mean(q_t, state.mean).unsqueeze(1))
        if return_variance:
            y_var.append(read_variance(q_t, state.variance).unsqueeze(1))
    return ScanOutput(
        y=torch.cat(y, 1).to(out_dtype),
        y_var=torch.cat(y_var, 1).to(out_dtype) if return_variance else None,
        state=KLAState(*(x.to(inputs.compute_dtype) for x in state)),
    )


def kla_step_ref(
    q: Keys,
    k: Keys,
    v: Values,
    lam_v: Precisions,
    a_bar: Dynamics,
    p_bar: Dynamics,
    state: KLAState,
    *,
    dt: Tensor | None = None,
    mask: Mask | None = None,
    return_variance: bool = False,
) -> ScanOutput:
    """One token in plain torch operations. Arguments and result as for ``kla_step``."""
    inputs = check_step(q, k, v, lam_v, a_bar, p_bar, state, mask, dt)
    return reference_step(inputs, return_variance=return_variance)


def reference_step(inputs: ScanInputs, *, return_variance: bool) -> ScanOutput:
    """The step on validated arguments; q, k ``[B, N]``, v, lam_v ``[B, D]``, mask ``[B]``."""
    dtype = inputs.compute_dtype
    q, k, v, lam_v = (x.to(dtype) for x in inputs[:4])
    old = KLAState(inputs.mean_0, inputs.variance_0)
    if inputs.mask is not None:
        blank = ~inputs.mask.unsqueeze(-1)
        q, k, v, lam_v = (x.masked_fill(blank, 0.0) for x in (q, k, v, lam_v))
    phi, b = token_evidence(k, without_gaps(v, lam_v), lam_v)
    step: tuple[Tensor, Tensor] = inputs.a_bar, inputs.p_bar
    if inputs.dt is not None:
        step = transition(*step, _gaps(inputs.dt, inputs.mask, dtype))
    state = moment.step(old, *step, phi, b)
    if inputs.mask is not None:
        real = inputs.mask[:, None, None]
        state = KLAState(*(torch.where(real, x, y) for x, y in zip(state, old, strict=True)))
    y_var = read_variance(q, state.variance).to(inputs.v.dtype) if return_variance else None
    return ScanOutput(y=read_mean(q, state.mean).to(inputs.v.dtype), y_var=y_var, state=state)


def _gaps(dt: Tensor, mask: Mask | None, dtype: torch.dtype) -> Tensor:
    return dt.to(dtype) if mask is None else dt.to(dtype).masked_fill(~mask.unsqueeze(-1), 0.0)
