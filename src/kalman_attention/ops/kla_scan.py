"""``kla_scan`` and ``kla_step``: check the arguments, pick an engine, call it.

This file is the only autograd boundary. Engines sit behind two registered ops,
``kalman_attention::scan`` and ``kalman_attention::scan_backward``, so that ``torch.compile`` and
``torch.export`` see one opaque differentiable call for every engine.
"""

from typing import Any

import torch
from torch import Tensor

from kalman_attention._typing import Dynamics, Keys, Mask, Precisions, Values
from kalman_attention.filtering.moment import KLAState
from kalman_attention.ops.arithmetic import needed_dtype
from kalman_attention.ops.checks import check_bounds, check_scan, check_step
from kalman_attention.ops.contract import ScanInputs, ScanOutput, own_types
from kalman_attention.ops.engines import ENGINES, REFERENCE, resolve
from kalman_attention.ops.reference import reference_scan, reference_step


def kla_scan(
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
    engine: str = "auto",
) -> ScanOutput:
    """Kalman linear attention: filter a sequence of tokens and read the posterior after each.

    Exact gradients flow to every floating input, including ``state``, from ``y``, ``y_var`` and the
    final state.

    Args:
        q: queries, the read-out operators, ``[B, T, N]``.
        k: keys, the observation operators, ``[B, T, N]``.
        v: values, ``[B, T, D]``; half, bfloat16, float32 or float64. T may be 0.
        lam_v: precision of each value, at least 0, ``[B, T, D]``. 0 means that a value is missing:
            time passes, the token brings no evidence, and v is not read there, even if it is NaN.
        a_bar: decay per token, in [-1, 1], ``[N, D]``; or ``[G, D]``, in which case neighbouring
            slots form G blocks that share decay, noise and variance.
        p_bar: process-noise variance per token, at least 0, in the shape of a_bar.
        dt: time that passes before each token, at least 0, ``[B, T]`` or ``[B, T, D]``, in units of
            the step that a_bar and p_bar belong to; requires a_bar > 0. None means 1 everywhere.
        state: initial state, a mean and a variance ``[B, N, D]`` (a shared variance is
            ``[B, G, D]``). None means mean 0 and variance 1.
        mask: ``[B, T]`` bool, False for padding: positions without a token, where no time passes.
            There the state stays exactly as it was, and y and y_var are set to 0. For missing
            values use ``lam_v`` = 0 instead.
        cu_seqlens: document boundaries in one packed row (B = 1), ``[n + 1]`` int. Each document
            starts from the prior, or from its row of ``state``; the returned state is
            ``[n, N, D]``.
        return_variance: also compute ``y_var``.
        acc_dtype: dtype of the arithmetic. None means float32 (float64 for float64 inputs), and on
            CPU tensors float64 where float32 would not be accurate enough. On other devices values
            are not inspected: pass ``torch.float64`` there for more than 4,096 tokens with |a_bar|
            above 0.9997 and p_bar below 1e-5 (over gaps, a_bar^dt and p_bar dt), or for gradients
            with respect to lam_v if the means of ``state``, times the keys, exceed all values a
            thousandfold.
        engine: ``"auto"``, or an engine that ``kla check`` lists; see ``use_engine``.

    Returns:
        ``ScanOutput(y, y_var, state)``.
    """
    inputs = check_scan(q, k, v, lam_v, a_bar, p_bar, state, mask, cu_seqlens, acc_dtype, dt)
    chosen = resolve(engine, v.device, v.dtype, gaps=dt is not None, slots=inputs.slots)
    if chosen == REFERENCE:
        with own_types(v):
            return reference_scan(inputs, return_variance=return_variance)
    return _run(inputs, return_variance, chosen)


def kla_step(
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
    engine: str = "auto",
) -> ScanOutput:
    """One token of ``kla_scan``: the same arguments without the T axis, and the state before it.

    Args:
        q: query, ``[B, N]``.
        k: key, ``[B, N]``.
        v: value, ``[B, D]``.
        lam_v: its precision, ``[B, D]``.
        a_bar: decay per token, ``[N, D]``.
        p_bar: process-noise variance per token, ``[N, D]``.
        state: state before the token, mean and variance ``[B, N, D]``; never modified in place.
        dt: time that passes before the token, ``[B]`` or ``[B, D]``; None means 1.
        mask: ``[B]`` bool, False where a row has no token.
        return_variance: also compute ``y_var``.
        engine: ``"auto"``, or an engine that ``kla check`` lists. An engine without a single-token
            kernel scans a sequence of one token; ``"auto"`` picks one that has such a kernel, or
            the reference.

    Returns:
        ``ScanOutput(y, y_var, state)`` with y ``[B, D]``.
    """
    inputs = check_step(q, k, v, lam_v, a_bar, p_bar, state, mask, dt)
    chosen = resolve(engine, v.device, v.dtype, step=True, gaps=dt is not None, slots=inputs.slots)
    if chosen == REFERENCE:
        with own_types(v):
            return reference_step(inputs, return_variance=return_variance)
    # The registered op is needed for gradients and inside graphs; the direct call saves its
    # overhead, which at a few microseconds per step would dominate.
    own = ENGINES[chosen].step
    if not own or torch.compiler.is_compiling() or _needs_gradients(inputs):
        return _step_by_scan(inputs, return_variance, chosen)
    result = ENGINES[chosen].load_step()(inputs, return_variance=return_variance)
    return ScanOutput(result.y, result.y_var, KLAState(result.mean, result.variance))


def _step_by_scan(inputs: ScanInputs, return_variance: bool, engine: str) -> ScanOutput:
    """A step as a scan over one token, for engines without a step and for the registered op."""
    q, k, v, lam_v = (x.unsqueeze(1) for x in inputs[:4])
    mask, dt = (None if x is None else x.unsqueeze(1) for x in (inputs.mask, inputs.dt))
    row = inputs._replace(q=q, k=k, v=v, lam_v=lam_v, mask=mask, dt=dt)
    out = _run(row, return_variance, engine)
    y_var = None if out.y_var is None else out.y_var.squeeze(1)
    return ScanOutput(out.y.squeeze(1), y_var, out.state)


def _needs_gradients(inputs: ScanInputs) -> bool:
    return torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*inputs[:8], inputs.dt)
    )


def _run(inputs: ScanInputs, return_variance: bool, engine: str) -> ScanOutput:
    save = _needs_gradients(inputs)  # checkpoints are only written if a backward pass may follow
    y, y_var, mean, variance, _ = scan(*inputs, return_variance, save, engine)
    return ScanOutput(y, y_var if return_variance else None, KLAState(mean, variance))


def _settled(*args: Any, gradients: bool) -> ScanInputs:
    """The inputs of an op, with the arithmetic chosen if it has not been yet."""
    # In a compiled graph and inside vmap the checks could not look at values.
    inputs = ScanInputs(*args)
    if inputs.acc_dtype is not None:
        return inputs
    return inputs._replace(acc_dtype=needed_dtype(inputs, gradients=gradients))


@torch.library.custom_op("kalman_attention::scan", mutates_args=())
def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam_v: Tensor,
    a_bar: Tensor,
    p_bar: Tensor,
    mean_0: Tensor,
    variance_0: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    acc_dtype: torch.dtype | None,
    dt: Tensor | None,
    return_variance: bool,
    save: bool,
    engine: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The registered op. It can only return tensors: results not requested have no elements."""
    inputs = _settled(
        q, k, v, lam_v, a_bar, p_bar, mean_0, variance_0, mask, cu_seqlens, acc_dtype, dt,
        gradients=save,
    )  # fmt: skip
    if cu_seqlens is not None:
        check_bounds(cu_seqlens, v.shape[1])
    with own_types(v):
        result = ENGINES[engine].load().forward(inputs, return_variance=return_variance, save=save)
    y_var = v.new_empty(0) if result.y_var is None else result.y_var
    saved = mean_0.new_empty(0) if result.checkpoints is None else result.checkpoints
    return result.y, y_var, result.mean, result.variance, saved


@scan.register_fake
def _scan_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs, (return_variance, save, _) = ScanInputs(*args[:12]), args[12:]
    (B, T, D), (R, N, _) = inputs.v.shape, inputs.mean_0.shape
    y = inputs.v.new_empty(B, T, D)
    belief = inputs.mean_0.new_empty(R, N, D)
    return (
        y,
        torch.empty_like(y) if return_variance else inputs.v.new_empty(0),
        belief,
        inputs.variance_0.new_empty(inputs.variance_0.shape),
        inputs.mean_0.new_empty((2, inputs.chunks, N, D) if save else 0),
    )


@torch.library.custom_op("kalman_attention::scan_backward", mutates_args=())
def scan_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam_v: Tensor,
    a_bar: Tensor,
    p_bar: Tensor,
    mean_0: Tensor,
    variance_0: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    acc_dtype: torch.dtype | None,
    dt: Tensor | None,
    checkpoints: Tensor,
    dy: Tensor | None,
    dy_var: Tensor | None,
    dmean: Tensor | None,
    dvariance: Tensor | None,
    engine: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients with respect to the floating inputs of ``scan``; empty for dt if dt is None."""
    inputs = _settled(
        q, k, v, lam_v, a_bar, p_bar, mean_0, variance_0, mask, cu_seqlens, acc_dtype, dt,
        gradients=True,
    )  # fmt: skip
    module = ENGINES[engine].load()
    with own_types(v):
        grads = module.backward(inputs, checkpoints, dy, dy_var, dmean, dvariance)
    dq, dk, dv, dlam_v, da_bar, dp_bar, dmean_0, dvariance_0, ddt = grads
    ddt = v.new_empty(0) if ddt is None else ddt
    return dq, dk, dv, dlam_v, da_bar, dp_bar, dmean_0, dvariance_0, ddt


@scan_backward.register_fake
def _scan_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    ddt = args[2].new_empty(0) if args[11] is None else args[11].new_empty(args[11].shape)
    return (*(x.new_empty(x.shape) for x in args[:8]), ddt)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, (acc_dtype, dt, return_variance, _, engine) = inputs[:10], inputs[10:]
    ctx.save_for_backward(*tensors, dt, output[4])
    ctx.acc_dtype, ctx.return_variance, ctx.engine = acc_dtype, return_variance, engine
    ctx.set_materialize_grads(False)  # engines take None for a gradient of 0, which is cheaper


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    dy, dy_var, dmean, dvariance, _ = grads
    *tensors, dt, checkpoints = ctx.saved_tensors
    dy_var = dy_var if ctx.return_variance else None
    *found, ddt = scan_backward(
        *tensors, ctx.acc_dtype, dt, checkpoints, dy, dy_var, dmean, dvariance, ctx.engine
    )
    # In the order of the arguments of ``scan``: mask, cu_seqlens and acc_dtype have no gradient.
    slots = (*found, None, None, None, None if dt is None else ddt, None, None, None)
    wanted = zip(slots, ctx.needs_input_grad, strict=True)
    return tuple(grad if needed else None for grad, needed in wanted)


def _refuse_second_order(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "kla_scan is differentiable once. For second derivatives use kla_scan_ref, or "
        "kla_scan(..., engine='reference'), which use plain torch operations only."
    )


scan.register_autograd(_differentiate, setup_context=_setup)
scan_backward.register_autograd(_refuse_second_order)
