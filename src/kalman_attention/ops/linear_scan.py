"""``linear_scan``: Mamba's selective scan (``eq:mamba-rec``), a deterministic relative of KLA.

With a state h per slot and channel: h' = exp(dt A) h + dt B x, and y = sum_n C h'. It serves the
baselines and supports what ``kla_scan`` does: initial and final states, padding, packed documents,
exact gradients. On CPU tensors it runs in the native library.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalman_attention._text import unknown
from kalman_attention._typing import Belief, Dynamics, Keys, Mask, Values
from kalman_attention.ops import checks
from kalman_attention.ops.contract import CHUNK, LinearScanInputs, compute_dtype
from kalman_attention.ops.cpu import library
from kalman_attention.ops.cpu.linear import linear_backward, linear_forward

NATIVE, REFERENCE = "cpu", "reference"
_MISSING = library.why_not()


class LinearScanOutput(NamedTuple):
    """Outputs ``[B, T, D]`` and the state after each row's last real token, ``[R, N, D]``."""

    y: Values
    state: Belief


def linear_scan(
    x: Values,
    dt: Values,
    A: Dynamics,
    B: Keys,
    C: Keys,
    *,
    state: Belief | None = None,
    mask: Mask | None = None,
    cu_seqlens: Tensor | None = None,
    engine: str = "auto",
) -> LinearScanOutput:
    """Run the selective scan; exact gradients for x, dt, A, B, C and the state.

    Args:
        x: inputs, ``[B, T, D]``.
        dt: step sizes, at least 0, ``[B, T, D]``.
        A: decay rates, at most 0, ``[N, D]``, float32 or float64.
        B: input operators, ``[B, T, N]``.
        C: read-out operators, ``[B, T, N]``.
        state: initial state, ``[R, N, D]``; None means 0.
        mask: ``[B, T]`` bool, False for padding, which leaves the state exactly as it was.
        cu_seqlens: document boundaries in one packed row, ``[n + 1]``.
        engine: ``"auto"``, ``"cpu"`` or ``"reference"``.

    Returns:
        ``LinearScanOutput(y, state)``.
    """
    inputs = _check(x, dt, A, B, C, state, mask, cu_seqlens)
    if _resolve(engine, x.device) == REFERENCE:
        return _reference(inputs)
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    y, h, _ = _scan(*inputs, save)
    return LinearScanOutput(y, h)


def linear_scan_ref(
    x: Values,
    dt: Values,
    A: Dynamics,
    B: Keys,
    C: Keys,
    *,
    state: Belief | None = None,
    mask: Mask | None = None,
    cu_seqlens: Tensor | None = None,
) -> LinearScanOutput:
    """The definition: a loop over time, differentiated by autograd; see ``linear_scan``."""
    return _reference(_check(x, dt, A, B, C, state, mask, cu_seqlens))


def _resolve(engine: str, device: torch.device) -> str:
    usable = _MISSING is None and device.type == "cpu"
    if engine == "auto":
        return NATIVE if usable else REFERENCE
    if engine not in (NATIVE, REFERENCE):
        raise ValueError(unknown("engine", engine, ("auto", NATIVE, REFERENCE)))
    if engine == NATIVE and not usable:
        reason = _MISSING or f"it runs on cpu tensors, these are on {device.type}"
        raise ValueError(f"engine 'cpu' cannot serve this call: {reason}. engine='reference' can.")
    return engine


def _check(
    x: Values,
    dt: Values,
    A: Dynamics,
    B: Keys,
    C: Keys,
    state: Belief | None,
    mask: Mask | None,
    cu_seqlens: Tensor | None,
) -> LinearScanInputs:
    checks.require_shape("x", x, "[B, T, D]", (None, None, None))
    batch, T, D = x.shape
    checks.require_shape("B", B, "[B, T, N]", (batch, T, None), "x", x)
    N = B.shape[2]
    checks.require_shape("dt", dt, "[B, T, D]", (batch, T, D), "x", x)
    checks.require_shape("C", C, "[B, T, N]", (batch, T, N), "B", B)
    checks.require_shape("A", A, "[N, D]", (N, D), "B and x give N, D =", (N, D))
    rows = batch if cu_seqlens is None else checks.require_packing(x, mask, cu_seqlens)
    if mask is not None:
        checks.require_mask(mask, (batch, T), "[B, T]")
    dtype = checks.require_token_dtypes(x=x, dt=dt, B=B, C=C)
    checks.require_float("A", A, dtype, "decays near 1 need its digits")
    if state is None:
        state = torch.zeros(rows, N, D, dtype=dtype, device=x.device)
    checks.require_belief("state", state, (rows, N, D), packed=cu_seqlens is not None)
    checks.require_float("state", state, dtype, "it is carried over the whole sequence")
    checks.require_device("x", x, dt=dt, A=A, B=B, C=C, state=state, mask=mask)
    return LinearScanInputs(x, dt, A, B, C, state, mask, cu_seqlens)


def _reference(inputs: LinearScanInputs) -> LinearScanOutput:
    if inputs.cu_seqlens is None:
        return _rows(inputs)
    outs = []
    bounds = checks.check_bounds(inputs.cu_seqlens, inputs.x.shape[1])
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        x, dt, B, C = (t[:, start:end] for t in (inputs.x, inputs.dt, inputs.B, inputs.C))
        h_0 = inputs.h_0[i : i + 1]
        outs.append(_rows(LinearScanInputs(x, dt, inputs.A, B, C, h_0, None, None)))
    return LinearScanOutput(torch.cat([o.y for o in outs], 1), torch.cat([o.state for o in outs]))


def _rows(inputs: LinearScanInputs) -> LinearScanOutput:
    dtype, mask = compute_dtype(inputs.x.dtype), inputs.mask
    tokens = [t.to(dtype) for t in (inputs.x, inputs.dt, inputs.B, inputs.C)]
    if mask is not None:
        # dt = 0 is the identity on the state, and C = 0 makes the output 0.
        tokens = [t.masked_fill(~mask.unsqueeze(-1), 0.0) for t in tokens]
    h, ys = inputs.h_0, [tokens[0][:, :0]]
    for x, dt, B, C in zip(*(t.unbind(1) for t in tokens), strict=True):  # [B, D], [B, N]
        decay = torch.exp(dt.unsqueeze(1) * inputs.A)
        h = decay * h + B.unsqueeze(-1) * (dt * x).unsqueeze(1)
        ys.append(torch.einsum("bn,bnd->bd", C, h).unsqueeze(1))
    return LinearScanOutput(torch.cat(ys, 1).to(inputs.x.dtype), h)


@torch.library.custom_op("kalman_attention::linear_scan", mutates_args=())
def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h_0: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if cu_seqlens is not None:
        checks.check_bounds(cu_seqlens, x.shape[1])
    result = linear_forward(LinearScanInputs(x, dt, A, B, C, h_0, mask, cu_seqlens), save=save)
    saved = h_0.new_empty(0) if result.checkpoints is None else result.checkpoints
    return result.y, result.h, saved


@_scan.register_fake
def _scan_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, save = LinearScanInputs(*args[:8]), args[8]
    (B, T, _), (R, N, D) = inputs.x.shape, inputs.h_0.shape
    chunks = B * -(-T // CHUNK) if inputs.cu_seqlens is None else T // CHUNK + R
    saved = inputs.h_0.new_empty((1, chunks, N, D) if save else 0)
    return inputs.x.new_empty(inputs.x.shape), inputs.h_0.new_empty(R, N, D), saved


@torch.library.custom_op("kalman_attention::linear_scan_backward", mutates_args=())
def _scan_backward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h_0: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    checkpoints: Tensor,
    dy: Tensor | None,
    dh: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = LinearScanInputs(x, dt, A, B, C, h_0, mask, cu_seqlens)
    dx, ddt, dA, dB, dC, dh_0 = linear_backward(inputs, checkpoints, dy, dh)
    return dx, ddt, dA, dB, dC, dh_0


@_scan_backward.register_fake
def _scan_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in args[:6])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8], output[2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, checkpoints = ctx.saved_tensors
    found = _scan_backward(*tensors, checkpoints, grads[0], grads[1])
    wanted = zip(found, ctx.needs_input_grad, strict=False)
    # mask, cu_seqlens and save have no gradient.
    return (*(grad if needed else None for grad, needed in wanted), None, None, None)


def _refuse_second_order(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "linear_scan is differentiable once. For second derivatives use linear_scan_ref, or "
        "linear_scan(..., engine='reference')."
    )


_scan.register_autograd(_differentiate, setup_context=_setup)
_scan_backward.register_autograd(_refuse_second_order)
