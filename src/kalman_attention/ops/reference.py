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
from kalman_attention.filtering.blocks import (
    block_evidence,
    from_blocks,
    read_blocks,
    to_blocks,
)
from kalman_attention.filtering.evidence import without_gaps
from kalman_attention.filtering.gaps import transition
from kalman_attention.filtering.moment import KLAState
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
    state = to_blocks(KLAState(*belief))
    q, k = (torch.unflatten(x, -1, state.mean.shape[1:3]) for x in (q, k))
    a_bar, p_bar = a_bar.unsqueeze(-2), p_bar.unsqueeze(-2)
    gaps = None if inputs.dt is None else _gaps(inputs.dt, inputs.mask, dtype).unbind(1)
    y, y_var = [v[:, :0]], [v[:, :0]]
    # unbind, not x[:, t]: the gradient of an index is as long as T, and there are T of them.
    tokens = zip(*(x.unbind(1) for x in (q, k, v, lam_v)), strict=True)
    for t, (q_t, k_t, v_t, lam_v_t) in enumerate(tokens):
        phi, b = block_evidence(k_t, v_t, lam_v_t)
        step = (a_bar, p_bar) if gaps is None else transition(a_bar, p_bar, gaps[t])
        new = moment.step(state, *step, phi, b)
        if inputs.mask is not None:
            real = inputs.mask[:, t, None, None, None]
            new = KLAState(*(torch.where(real, x, y) for x, y in zip(new, state, strict=True)))
        state = new
        mean, variance = read_blocks(q_t, state)
        y.append(mean.unsqueeze(1))
        y_var.append(variance.unsqueeze(1))
    return ScanOutput(
        y=torch.cat(y, 1).to(out_dtype),
        y_var=torch.cat(y_var, 1).to(out_dtype) if return_variance else None,
        state=KLAState(*(x.to(inputs.compute_dtype) for x in from_blocks(state))),
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
    row = {name: getattr(inputs, name).unsqueeze(1) for name in ("q", "k", "v", "lam_v")}
    mask, dt = (None if x is None else x.unsqueeze(1) for x in (inputs.mask, inputs.dt))
    out = _rows(inputs._replace(**row, mask=mask, dt=dt), return_variance)
    y_var = None if out.y_var is None else out.y_var.squeeze(1)
    return ScanOutput(out.y.squeeze(1), y_var, out.state)


def _gaps(dt: Tensor, mask: Mask | None, dtype: torch.dtype) -> Tensor:
    """Gaps ``[B, T, 1, D]``, 0 in padding, ready to meet the dynamics of blocks."""
    dt = dt.to(dtype) if mask is None else dt.to(dtype).masked_fill(~mask.unsqueeze(-1), 0.0)
    return dt.unsqueeze(-2)
