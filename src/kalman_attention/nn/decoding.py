"""One token per row on a CPU: native code for what torch does in many small operations.

At a batch of one to four, decoding is bound by reading the weights. torch's products with so few
rows do not reach the speed of the memory, and each of its operations costs microseconds. This file
decides for each call whether native code can take over; otherwise modules are called as usual. The
results are those of the modules up to rounding (``tests/nn/test_decoding.py``).
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from kalman_attention._typing import Mask
from kalman_attention.nn.mixer import Bias, Skip
from kalman_attention.nn.norms import RMSNorm
from kalman_attention.nn.short_conv import ShortConv
from kalman_attention.ops.checks import checks_values
from kalman_attention.ops.cpu import (
    LayerOptions,
    LayerTokens,
    LayerWeights,
    can_decode,
    few_rows_product,
    is_stored,
    layer_step,
    rates,
)
from kalman_attention.ops.engines import NATIVE, resolve

if TYPE_CHECKING:
    from kalman_attention.nn.kla import KLA


_PARTS: tuple[tuple[str, type[nn.Module], tuple[str, ...]], ...] = (
    ("norm", RMSNorm, ("weight",)),
    ("in_proj", nn.Linear, ("weight", "bias")),
    ("conv", ShortConv, ("weight", "bias")),
    ("evidence_proj", nn.Linear, ("weight", "bias")),
    ("precision_up", nn.Linear, ("weight", "bias")),
    ("step_up", nn.Linear, ("weight",)),
    ("gate_bias", Bias, ("weight",)),
    ("skip", Skip, ("weight",)),
    ("readout_norm", RMSNorm, ("weight",)),
    ("out_proj", nn.Linear, ("weight", "bias")),
)
"""Modules of a layer and their parameters, in the order of ``LayerWeights``."""


def project(linear: nn.Module, x: Tensor) -> Tensor:
    """``linear(x)``, by a native product if x has one token per row.

    Args:
        linear: usually an ``nn.Linear``; a replaced, quantised or hooked module is called instead.
        x: ``[B, in]`` or ``[B, 1, in]``; any other shape is passed to ``linear``.
    """
    if can_decode(x) and isinstance(linear, nn.Linear) and _is_plain(linear, nn.Linear):
        weight, bias = linear.weight, linear.bias
        fits = x.shape[-1] == weight.shape[-1]  # torch reports a wrong width
        if fits and is_stored(weight, x.dtype) and is_stored(bias, x.dtype):
            return few_rows_product(x, weight, bias)
    y: Tensor = linear(x)
    return y


def decode_token(
    layer: "KLA", x: Tensor, state: Any, mask: Mask | None, norm: RMSNorm | None = None
) -> LayerTokens | None:
    """One token per row through a KLA layer in one native call; None if that is not possible.

    Args:
        layer: the layer.
        x: ``[B, d_model]``.
        state: ``LayerState`` of the previous call.
        mask: ``[B]`` bool, False where a row has no token.
        norm: the norm before the layer; the result is then x + layer(norm(x)).

    Returns:
        The output and the new state.
    """
    # The checks run for every token, so the cheap ones that usually decide come first.
    if not (can_decode(x) and _is_served(layer, x)):
        return None
    weights, tokens = _weights(layer, norm, x.dtype), _tokens(layer, x, state)
    if weights is None or tokens is None or not _fits(weights, tokens):
        return None
    if mask is not None and not (is_stored(mask, torch.bool) and mask.shape == x.shape[:1]):
        return None
    a_bar, p_bar, _ = layer.prior.cached()
    raw_dt, scale = None, 1.0
    if layer.steps is not None:
        raw_dt, scale = layer.steps.raw_dt, 1.0 / layer.steps.unit
        a_bar, p_bar = rates(a_bar, p_bar)
    config, inner = layer.config, layer.readout_norm
    options = LayerOptions(
        config.qk_norm,
        config.precision_link,
        config.precision_floor,
        0.0 if norm is None else norm.eps,
        0.0 if inner is None else inner.eps,
        scale,
    )
    return layer_step(tokens, weights, options, a_bar, p_bar, mask, raw_dt)


def _is_served(layer: "KLA", x: Tensor) -> bool:
    """Whether native code implements everything that the layer does with a token."""
    config = layer.config
    return (
        config.num_reflections == 0
        and config.frequencies is None
        and layer.context is None
        and x.dim() == 2
        and x.shape[1] == config.d_model
        and not checks_values()
        and _engine(layer, x) == NATIVE
    )


def _engine(layer: "KLA", x: Tensor) -> str:
    config = layer.config
    name, slots = config.engine or "auto", config.shared_slots
    return resolve(name, x.device, x.dtype, step=True, slots=slots)


def _weights(layer: "KLA", norm: RMSNorm | None, dtype: torch.dtype) -> LayerWeights | None:
    """The weights of a layer, if none of its modules was replaced, hooked or parametrised."""
    # From the dictionaries: module attributes are slow to look up, and this runs for every token.
    modules, found = layer._modules, list[Tensor | None]()
    for name, kind, parameters in _PARTS:
        module = norm if name == "norm" else modules.get(name)
        if module is None:
            found += [None] * len(parameters)
            continue
        own = module._parameters
        if not _is_plain(module, kind) or own.get("weight") is None:  # parametrised
            return None
        for parameter in parameters:
            if not is_stored(own[parameter], dtype):
                return None
            found.append(own[parameter])
    return LayerWeights._make(found)


def _tokens(layer: "KLA", x: Tensor, state: Any) -> LayerTokens | None:
    """Tokens and state as native code reads them; None for a state of another layer."""
    if not (isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], tuple)):
        return None
    config, rows = layer.config, x.shape[0]
    window, mean, variance = state[0], *(z.contiguous() for z in state[1])
    window = (window if window.dtype is x.dtype else window.to(x.dtype)).contiguous()
    D, taps = config.width, config.conv_kernel or 1
    fits = (
        window.shape == (rows, taps - 1, D)
        and mean.shape == (rows, config.d_state, D)
        and variance.shape == (rows, config.blocks, D)
        and is_stored(window, x.dtype)
        and is_stored(mean, torch.float32)
        and is_stored(variance, torch.float32)
    )
    return LayerTokens(x, window, mean, variance) if fits else None


def _fits(weights: LayerWeights, tokens: LayerTokens) -> bool:
    """Whether the widths of weights, tokens and state agree; native code checks matrices."""
    D, taps = tokens.mean.shape[2], weights.conv_weight
    vectors = (taps, weights.conv_bias, weights.gate_bias, weights.skip, weights.readout_norm)
    return (
        weights.in_proj.shape[1] == tokens.x.shape[1]
        and (weights.norm is None or weights.norm.shape[0] == tokens.x.shape[1])
        and all(x is None or x.shape[-1] == D for x in vectors)
        and (taps is None or taps.shape[0] == tokens.window.shape[1] + 1)
    )


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling a module runs exactly the forward of ``kind``: not replaced, no hooks."""
    return (
        type(module).forward is kind.forward
        and "forward" not in module.__dict__
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and not _global_forward_hooks
        and not _global_forward_pre_hooks
    )
