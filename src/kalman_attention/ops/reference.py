"""The definition of the op: a readable loop over time, differentiated by autograd.

The step is the paper's filter in moment form. (The information form is the same filter, as a test
shows, but without process noise its precision overflows like a_bar^(-2t), so it cannot serve as the
reference for 65,536 tokens.)
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

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
from kalman_attention.filtering.gaps import Transition, transition
from kalman_attention.filtering.moment import KLAState
from kalman_attention.ops.checks import check_bounds, check_scan, check_step
from kalman_attention.ops.contract import ScanInputs, ScanOutput, where


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
    """The loop on validated arguments; packed documents are processed one by one."""
    return join([_rows(row, return_variance) for row in documents(inputs)])


def documents(inputs: ScanInputs) -> list[ScanInputs]:
    """Split a packed call into one call per document; a call without packing is returned as is."""
    if inputs.cu_seqlens is None:
        return [inputs]
    bounds = check_bounds(inputs.cu_seqlens, inputs.v.shape[1])
    found = []
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        q, k, v, lam_v = (x[:, start:end] for x in inputs[:4])
        document = inputs._replace(
            q=q, k=k, v=v, lam_v=lam_v,
            mean_0=inputs.mean_0[i : i + 1], variance_0=inputs.variance_0[i : i + 1],
            cu_seqlens=None, dt=None if inputs.dt is None else inputs.dt[:, start:end],
        )  # fmt: skip
        found.append(document)
    return found


def join(parts: list[ScanOutput]) -> ScanOutput:
    """Concatenate the outputs of documents into those of the packed row."""
    if len(parts) == 1:
        return parts[0]
    variances = [part.y_var for part in parts if part.y_var is not None]
    return ScanOutput(
        y=torch.cat([part.y for part in parts], 1),
        y_var=torch.cat(variances, 1) if variances else None,
        state=KLAState(*(torch.cat(x) for x in zip(*(p.state for p in parts), strict=True))),
    )


class Token(NamedTuple):
    """One token of every row, slots in G blocks of m (``filtering/blocks.py``).

    Attributes:
        q: query, ``[B, G, m]``; 0 in padding, like k, v, lam_v.
        k: key, ``[B, G, m]``.
        v: value, ``[B, D]``; 0 where it is missing and not finite.
        lam_v: its precision, ``[B, D]``.
        a: decay of the step to the token; broadcasts against beliefs ``[B, G, m, D]``.
        p: process-noise variance of that step.
        phi: precision that the token adds, ``[B, G, 1, D]``.
        b: information that it adds, ``[B, G, m, D]``.
        real: True for a real token, ``[B, 1, 1, 1]``; None if all rows have one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lam_v: Tensor
    a: Tensor
    p: Tensor
    phi: Tensor
    b: Tensor
    real: Tensor | None


def initial_belief(inputs: ScanInputs) -> KLAState:
    """The belief before the first token, in blocks and in the dtype of the arithmetic."""
    dtype = inputs.arithmetic_dtype
    return to_blocks(KLAState(inputs.mean_0.to(dtype), inputs.variance_0.to(dtype)))


def tokens(inputs: ScanInputs) -> Iterator[Token]:
    """Iterate over the tokens of a call without packing."""
    dtype, mask = inputs.arithmetic_dtype, inputs.mask
    q, k, v, lam_v, a_bar, p_bar = (x.to(dtype) for x in inputs[:6])
    if mask is not None:
        # Padding may contain anything, even NaN, which must not reach a gradient.
        q, k, v, lam_v = (x.masked_fill(~mask.unsqueeze(-1), 0.0) for x in (q, k, v, lam_v))
    v = without_gaps(v, lam_v)
    q, k = (torch.unflatten(x, -1, (a_bar.shape[0], -1)) for x in (q, k))
    a_bar, p_bar = a_bar.unsqueeze(-2), p_bar.unsqueeze(-2)
    steps: list[Transition] | None = None
    if inputs.dt is not None:
        passed = transition(a_bar, p_bar, _gaps(inputs.dt, mask, dtype))
        steps = [Transition(a, p) for a, p in zip(*(x.unbind(1) for x in passed), strict=True)]
    # unbind, not x[:, t]: the gradient of an index has length T, and there are T of them. At 2,048
    # tokens the loop with its backward pass takes a quarter of the time.
    every = zip(*(x.unbind(1) for x in (q, k, v, lam_v)), strict=True)
    for t, (q_t, k_t, v_t, lam_v_t) in enumerate(every):
        a, p = (a_bar, p_bar) if steps is None else steps[t]
        real = None if mask is None else mask[:, t, None, None, None]
        phi, b = block_evidence(k_t, v_t, lam_v_t)
        yield Token(q_t, k_t, v_t, lam_v_t, a, p, phi, b, real)


def filter_token(state: KLAState, token: Token) -> KLAState:
    """The belief after a token; padding leaves it unchanged."""
    new = moment.step(state, token.a, token.p, token.phi, token.b)
    return new if token.real is None else where(token.real, new, state)


def _rows(inputs: ScanInputs, return_variance: bool) -> ScanOutput:
    state, out_dtype = initial_belief(inputs), inputs.v.dtype
    # An empty piece first, so that cat works for T = 0.
    y, y_var = [inputs.v[:, :0].to(state.mean.dtype)], [inputs.v[:, :0].to(state.mean.dtype)]
    for token in tokens(inputs):
        state = filter_token(state, token)
        mean, variance = read_blocks(token.q, state)
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
    """Gaps ``[B, T, 1, D]``, 0 at padding; broadcast against the dynamics of blocks."""
    dt = dt.to(dtype) if mask is None else dt.to(dtype).masked_fill(~mask.unsqueeze(-1), 0.0)
    return dt.unsqueeze(-2)
