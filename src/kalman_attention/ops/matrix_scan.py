"""``matrix_scan``: the matrix memory of the baselines, in the native library.

Per row and head, with a state S ``[K, V]``, decays alpha and rates beta::

    D_t = diag(alpha_t) S_{t-1}
    w_t = beta_t v_t                    or, with the delta rule, beta_t (v_t - D_t^T k_t)
    S_t = D_t + k_t w_t^T
    y_t = S_t^T q_t

Gated linear attention has one decay per key channel and beta = 1, Gated DeltaNet one decay per head
and the delta rule, mLSTM one decay per head and its input gate as beta.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalman_attention.ops import checks
from kalman_attention.ops.cpu import library
from kalman_attention.ops.cpu.memory import (
    MemoryInputs,
    Saved,
    memory_backward,
    memory_forward,
)

_MISSING = library.why_not()


class MatrixScanOutput(NamedTuple):
    """Outputs ``[B, T, H, V]`` and the state after the last token, ``[B, H, K, V]``."""

    y: Tensor
    state: Tensor


def can_scan(v: Tensor) -> bool:
    """Whether ``matrix_scan`` can run on the device of v, here and now."""
    if _MISSING is not None or not v.is_cpu:
        return False
    # vmap and other transforms take torch operations apart; a compiler keeps the op as it is.
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None


def matrix_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    state: Tensor,
    beta: Tensor | None = None,
    *,
    delta: bool = False,
) -> MatrixScanOutput:
    """Run the recurrence on CPU tensors; exact gradients for every tensor.

    Gradients that are differentiated again are computed by ``matrix_scan_ref``, token by token.

    Args:
        q: queries, ``[B, T, H, K]``, float32 or float64 like all others.
        k: keys, of the same shape.
        v: values, ``[B, T, H, V]``.
        alpha: decays between 0 and 1, ``[B, T, H, K]``, or ``[B, T, H, 1]`` for one per head.
        state: initial state, ``[B, H, K, V]``.
        beta: rates, ``[B, T, H]``; None means 1.
        delta: subtract from a value what the memory returns for its key, before it is written.

    Returns:
        ``MatrixScanOutput(y, state)``.
    """
    inputs = _check(q, k, v, alpha, state, beta)
    if _MISSING is not None or not v.is_cpu:
        reason = _MISSING or f"it runs on cpu tensors, these are on {v.device.type}"
        raise ValueError(f"matrix_scan cannot serve this call: {reason}. matrix_scan_ref can.")
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    y, last, _, _ = _scan(*inputs, delta, save)
    return MatrixScanOutput(y, last)


def matrix_scan_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    state: Tensor,
    beta: Tensor | None = None,
    *,
    delta: bool = False,
) -> MatrixScanOutput:
    """The definition: a loop over tokens, differentiated by autograd; see ``matrix_scan``."""
    return _loop(_check(q, k, v, alpha, state, beta), delta)


def _check(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, state: Tensor, beta: Tensor | None
) -> MemoryInputs:
    checks.require_shape("q", q, "[B, T, H, K]", (None,) * 4)
    B, T, H, K = q.shape
    checks.require_shape("k", k, "[B, T, H, K]", (B, T, H, K), "q", q)
    checks.require_shape("v", v, "[B, T, H, V]", (B, T, H, None), "q", q)
    V = v.shape[3]
    if not K or not V:
        raise ValueError(
            f"heads need at least one key and one value channel, got q {list(q.shape)} and v "
            f"{list(v.shape)}."
        )
    shared = isinstance(alpha, Tensor) and alpha.dim() == 4 and alpha.shape[3] == 1
    legend = "[B, T, H, K] or [B, T, H, 1]"
    checks.require_shape("alpha", alpha, legend, (B, T, H, 1 if shared else K), "q", q)
    checks.require_shape("state", state, "[B, H, K, V]", (B, H, K, V), "q and v", (B, H, K, V))
    tensors = {"k": k, "v": v, "alpha": alpha, "state": state}
    if beta is not None:
        checks.require_shape("beta", beta, "[B, T, H]", (B, T, H), "q", q)
        tensors["beta"] = beta
    for name, x in {"q": q, **tensors}.items():
        if x.dtype != q.dtype or x.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} is {x.dtype} and q is {q.dtype}, but all tensors must be float32, or all "
                f"float64: convert them with .to(torch.float32)."
            )
    checks.require_device("q", q, **tensors)
    return MemoryInputs(q, k, v, alpha, state, beta)


def _loop(inputs: MemoryInputs, delta: bool) -> MatrixScanOutput:
    q, k, v, alpha, state, beta = inputs
    y = [v[:, :0]]
    for t in range(q.shape[1]):
        state = alpha[:, t].unsqueeze(-1) * state
        written = v[:, t]
        if delta:
            written = written - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        if beta is not None:
            written = beta[:, t].unsqueeze(-1) * written
        state = state + k[:, t].unsqueeze(-1) * written.unsqueeze(-2)
        y.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state).unsqueeze(1))
    return MatrixScanOutput(torch.cat(y, 1), state)


@torch.library.custom_op("kalman_attention::matrix_scan", mutates_args=())
def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    state: Tensor,
    beta: Tensor | None,
    delta: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = MemoryInputs(q, k, v, alpha, state, beta)
    y, last, saved = memory_forward(inputs, delta=delta, save=save)
    if saved is None:
        return y, last, state.new_empty(0), state.new_empty(0)
    return y, last, saved.checkpoints, saved.residual


@_scan.register_fake
def _scan_fake(*args: Any) -> tuple[Tensor, ...]:
    inputs, delta, save = MemoryInputs(*args[:6]), args[6], args[7]
    saved = inputs.new_saved(delta) if save else (args[4].new_empty(0), args[4].new_empty(0))
    return inputs.v.new_empty(inputs.v.shape), inputs.state.new_empty(inputs.state.shape), *saved


@torch.library.custom_op("kalman_attention::matrix_scan_backward", mutates_args=())
def _scan_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    state: Tensor,
    beta: Tensor | None,
    delta: bool,
    checkpoints: Tensor,
    residual: Tensor,
    dy: Tensor | None,
    dstate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = MemoryInputs(q, k, v, alpha, state, beta)
    *grads, dbeta = memory_backward(inputs, Saved(checkpoints, residual), dy, dstate, delta=delta)
    dq, dk, dv, dalpha, dstate_0 = grads
    return dq, dk, dv, dalpha, dstate_0, q.new_empty(0) if dbeta is None else dbeta


@_scan_backward.register_fake
def _scan_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    beta = args[0].new_empty(0) if args[5] is None else args[5]
    return tuple(x.new_empty(x.shape) for x in (*args[:5], beta))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.delta, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, checkpoints, residual = ctx.saved_tensors  # once: checkpointing recomputes them
    inputs, needed = MemoryInputs(*tensors), ctx.needs_input_grad[:6]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = _through_the_loop(inputs, ctx.delta, grads[0], grads[1], needed)
    else:
        found = _scan_backward(*inputs, ctx.delta, checkpoints, residual, grads[0], grads[1])
    # delta and save have no gradient.
    wanted = zip(found, needed, strict=True)
    return (*(grad if asked else None for grad, asked in wanted), None, None)


def _through_the_loop(
    inputs: MemoryInputs,
    delta: bool,
    dy: Tensor | None,
    dstate: Tensor | None,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients by torch operations, for gradients that are differentiated again."""
    with torch.enable_grad():
        outputs = _loop(inputs, delta)
    given = [(out, d) for out, d in zip(outputs, (dy, dstate), strict=True) if d is not None]
    wanted = [x for x, asked in zip(inputs, needed, strict=True) if x is not None and asked]
    found = iter(
        torch.autograd.grad(
            [out for out, _ in given],
            wanted,
            [d for _, d in given],
            create_graph=True,
            materialize_grads=True,
        )
    )
    return tuple(next(found) if asked else None for asked in needed)


def _refuse_second_order(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "a compiled matrix_scan is differentiable once. For second derivatives use it uncompiled, "
        "or matrix_scan_ref."
    )


_scan.register_autograd(_differentiate, setup_context=_setup)
_scan_backward.register_autograd(_refuse_second_order)
