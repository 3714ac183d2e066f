"""``kla_smooth`` and ``kla_innovations``: a series in hindsight, and how well a model predicts it.

The definitions are readable loops in plain torch operations, differentiated by autograd, on any
device; they hold the belief at every token, ``[B, T, N, D]``. Smoothing has two more engines:
``ops/torch/smoothing.py``, which is parallel in time, and the native one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kalman_attention._typing import Belief, Dynamics, Keys, Mask, Precisions, Values
from kalman_attention.filtering import innovation, moment
from kalman_attention.filtering.blocks import from_blocks, read_blocks
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.smoothing import Future, smooth, step_back
from kalman_attention.ops import cpu
from kalman_attention.ops.checks import check_bounds, check_scan
from kalman_attention.ops.contract import CHUNK, ScanInputs, ScanOutput, own_types, where
from kalman_attention.ops.engines import REFERENCE, meant
from kalman_attention.ops.reference import (
    documents,
    filter_token,
    initial_belief,
    join,
    tokens,
)
from kalman_attention.ops.torch.smoothing import smooth_rows


def kla_smooth(
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
    acc_dtype: torch.dtype | None = None,
    engine: str = "auto",
) -> ScanOutput:
    """Read the posterior at each token given all tokens, including later ones.

    This interpolates a series: ``kla_scan`` conditions on the tokens so far, smoothing on all of
    them, so its variance is never larger. Arguments as for ``kla_scan``; gradients flow to every
    floating input.

    Args:
        q: queries, ``[B, T, N]``.
        k: keys, ``[B, T, N]``.
        v: values, ``[B, T, D]``.
        lam_v: precision of each value, ``[B, T, D]``; 0 where a value is missing.
        a_bar: decay per token, ``[N, D]`` or ``[G, D]``.
        p_bar: process-noise variance per token, in the shape of a_bar.
        dt: time that passes before each token, ``[B, T]`` or ``[B, T, D]``; None means 1.
        state: initial state.
        mask: ``[B, T]`` bool, False for padding.
        cu_seqlens: document boundaries in one packed row; documents are independent.
        acc_dtype: dtype of the arithmetic.
        engine: ``"reference"``, ``"associative"`` or ``"cpu"``. ``"auto"`` picks the native engine
            for CPU tensors, which is by far the fastest and differentiable once; otherwise
            ``"associative"``, or the loop for up to 64 tokens, which are differentiable any number
            of times.

    Returns:
        ``ScanOutput(y, y_var, state)``, always with y_var; ``state`` is the state after the last
        token, as from ``kla_scan``.
    """
    inputs = check_scan(q, k, v, lam_v, a_bar, p_bar, state, mask, cu_seqlens, acc_dtype, dt)
    if cu_seqlens is not None:
        check_bounds(cu_seqlens, v.shape[1])
    chosen = _choose(engine, inputs)
    if chosen == "cpu":
        y, y_var, mean, variance = _NativeSmooth.apply(*inputs)  # type: ignore[no-untyped-call]
        return ScanOutput(y, y_var, KLAState(mean, variance))
    with own_types(v):
        if chosen == "associative":
            return smooth_rows(inputs)
        return join([_smooth_rows(row) for row in documents(inputs)])


def _choose(engine: str, inputs: ScanInputs) -> str:
    name, reason = meant(engine), _not_native(inputs)
    if name == "auto":
        # A single chunk has nothing to run in parallel.
        torch_engine = "associative" if inputs.v.shape[1] > CHUNK else REFERENCE
        return torch_engine if reason else "cpu"
    if name not in (REFERENCE, "associative", "cpu"):
        raise ValueError(
            f"engine {name!r} can filter but not smooth. engine='associative' can; so can 'cpu' "
            "and 'reference'."
        )
    if name == "cpu" and reason:
        raise ValueError(
            f"engine 'cpu' cannot smooth this call: {reason}. engine='associative' can."
        )
    return name


def _not_native(inputs: ScanInputs) -> str | None:
    """Why the native engine cannot smooth a call; None if it can."""
    if inputs.v.device.type != "cpu":
        return f"it runs on cpu tensors, these are on {inputs.v.device.type}"
    if torch.compiler.is_compiling():
        return "it does not run inside a compiled graph"
    return cpu.why_not()


class _NativeSmooth(torch.autograd.Function):
    """Native smoothing with its gradients; the arguments are the fields of ``ScanInputs``."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor | None, ...]:
        inputs = ScanInputs(*args)
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
        ctx.acc_dtype = inputs.acc_dtype
        ctx.set_materialize_grads(False)  # None for a gradient of 0 is cheaper
        return tuple(cpu.smooth(inputs)[:4])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ScanInputs(*ctx.saved_tensors)._replace(acc_dtype=ctx.acc_dtype)
        found = cpu.smooth_backward(inputs, *grads)
        return *found[:8], None, None, None, found.dt


class Innovations(NamedTuple):
    """How each value compares with its prediction, ``[B, T, N, D]`` each.

    Attributes:
        log_likelihood: log density of the value under its prediction, in nats; 0 where the value is
            missing. With one slot its sum over tokens is the log-likelihood of the series.
        normalised: squared innovation over its predicted variance, 1 on average if the model fits;
            0 where the value is missing.
    """

    log_likelihood: Belief
    normalised: Belief


def kla_innovations(
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
    acc_dtype: torch.dtype | None = None,
) -> Innovations:
    """Log-likelihood and normalised innovation of every value, given those before it.

    Maximise ``log_likelihood.sum()`` over decay, noise and precisions to fit them to a series.
    Exact for one slot; with several, each slot is a separate model of the same value. Arguments as
    for ``kla_scan``, without a query.

    Args:
        k: keys, ``[B, T, N]``.
        v: values, ``[B, T, D]``.
        lam_v: precision of each value, ``[B, T, D]``; 0 where a value is missing.
        a_bar: decay per token, ``[N, D]``.
        p_bar: process-noise variance per token, ``[N, D]``.
        dt: time that passes before each token, ``[B, T]`` or ``[B, T, D]``; None means 1.
        state: initial state.
        mask: ``[B, T]`` bool, False for padding.
        cu_seqlens: document boundaries in one packed row.
        acc_dtype: dtype of the arithmetic.

    Returns:
        ``Innovations(log_likelihood, normalised)``, in the dtype of the state.
    """
    inputs = check_scan(k, k, v, lam_v, a_bar, p_bar, state, mask, cu_seqlens, acc_dtype, dt)
    if inputs.slots > 1:
        raise ValueError(
            f"a_bar has {a_bar.shape[0]} rows for {k.shape[-1]} slots: innovations are per slot, "
            "but slots with a shared precision observe a value together. Pass a_bar and p_bar "
            "[N, D]."
        )
    parts = [_innovation_rows(row) for row in documents(inputs)]
    return Innovations(*(torch.cat(x, 1) for x in zip(*parts, strict=True)))


def _smooth_rows(inputs: ScanInputs) -> ScanOutput:
    """Filter forwards and keep every belief; then go back and add the likelihood of the future."""
    state, given = initial_belief(inputs), list(tokens(inputs))
    filtered = []
    for token in given:
        state = filter_token(state, token)
        filtered.append(state)
    empty = inputs.v[:, :0].to(state.mean.dtype)
    # Read-outs are appended from the last token to the first, and reversed in the end.
    future, y, y_var = Future.nothing_like(state), [empty], [empty]
    for token, belief in zip(reversed(given), reversed(filtered), strict=True):
        mean, variance = read_blocks(token.q, smooth(belief, future))
        y.append(mean.unsqueeze(1))
        y_var.append(variance.unsqueeze(1))
        before = step_back(future, token.a, token.p, token.phi, token.b)
        future = before if token.real is None else where(token.real, before, future)
    dtype = inputs.v.dtype
    return ScanOutput(
        y=torch.cat(y[::-1], 1).to(dtype),
        y_var=torch.cat(y_var[::-1], 1).to(dtype),
        state=KLAState(*(x.to(inputs.compute_dtype) for x in from_blocks(state))),
    )


def _innovation_rows(inputs: ScanInputs) -> Innovations:
    state = initial_belief(inputs)
    empty = from_blocks(state).mean.unsqueeze(1)[:, :0]
    density, squares = [empty], [empty]
    for token in tokens(inputs):
        prior = from_blocks(moment.predict(state, token.a, token.p))
        seen = (prior, token.k.flatten(1), token.v, token.lam_v)
        density.append(innovation.log_likelihood(*seen).unsqueeze(1))
        squares.append(innovation.normalised_innovation(*seen).unsqueeze(1))
        state = filter_token(state, token)
    return Innovations(
        *(torch.cat(x, 1).to(inputs.compute_dtype) for x in (density, squares)),
    )
