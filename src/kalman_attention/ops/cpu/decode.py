"""Decoding on a CPU: products of a few rows with a matrix, and one token per row through a layer.

Both are bound by the time to read the weights, which are used as ``nn.Linear`` stores them, in
float32 or bfloat16; the arithmetic is float32.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kalman_attention.ops.contract import DTYPES, at
from kalman_attention.ops.cpu.library import ABI_VERSION, ISA, check, load, why_not

# KLA_FEW_ROWS of csrc/kla_decode.h: the rows that share one reading of a matrix. With more rows
# torch's own products use each weight often enough to be no longer bound by memory.
FEW_ROWS = 4
"""Largest number of rows of a call."""

LINKS = {"inverse_softplus": 0, "softplus": 1, "exp": 2}
"""Codes of ``csrc/kla_decode.h`` for the precision links."""

_STORED = (torch.float32, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)
_PRODUCT = struct.Struct("=11q")
_LAYER = struct.Struct("=12q4d38q")
_NO_MATRIX = (0, 0, 0, 0)


class LayerWeights(NamedTuple):
    """The weights of a KLA layer, all of one dtype.

    Attributes:
        norm: gain of the norm before the layer, ``[d_model]``; None for no norm and no residual.
        in_proj: stream and gate, ``[2 D, d_model]``.
        in_bias: bias of that projection.
        conv_weight: taps, ``[K, D]``; None without a convolution.
        conv_bias: ``[D]``.
        evidence_proj: value (if projected), precision, step (if chosen), key, query, ``[.., D]``.
        evidence_bias: bias of that projection.
        precision_up: from a precision of low rank to all channels, ``[D, rank]``; None if the
            precision has full rank.
        precision_bias: bias of that projection.
        step_up: the same for step sizes, ``[D, rank]``; None if tokens do not choose them.
        gate_bias: ``[D]``.
        skip: ``[D]``.
        readout_norm: gain, ``[D]``.
        out_proj: ``[d_model, D]``.
        out_bias: bias of that projection.
    """

    norm: Tensor | None
    in_proj: Tensor
    in_bias: Tensor | None
    conv_weight: Tensor | None
    conv_bias: Tensor | None
    evidence_proj: Tensor
    evidence_bias: Tensor | None
    precision_up: Tensor | None
    precision_bias: Tensor | None
    step_up: Tensor | None
    gate_bias: Tensor | None
    skip: Tensor | None
    readout_norm: Tensor | None
    out_proj: Tensor
    out_bias: Tensor | None


class LayerOptions(NamedTuple):
    """Options of a KLA layer that its weights do not determine.

    Attributes:
        qk_norm: whether keys and queries are scaled to length 1.
        link: precision link, a key of ``LINKS``.
        floor: floor of the link.
        norm_eps: epsilon of the norm before the layer.
        readout_eps: epsilon of the norm of the read-out.
        step_scale: a token takes step_scale softplus(step + step_bias), if it chooses its step.
    """

    qk_norm: bool
    link: str
    floor: float
    norm_eps: float
    readout_eps: float
    step_scale: float = 1.0


class LayerTokens(NamedTuple):
    """Tokens and state of a call: its input and its result.

    Attributes:
        x: ``[R, d_model]``.
        window: previous inputs of the convolution, ``[R, K - 1, D]``.
        mean: ``[R, N, D]``.
        variance: ``[R, G, D]``.
    """

    x: Tensor
    window: Tensor
    mean: Tensor
    variance: Tensor


def can_decode(x: Tensor) -> bool:
    """Whether native code can take x: ``[R, d]`` or ``[R, 1, d]`` with few rows.

    Gradients, compilers and autocast use torch operations instead.
    """
    return (
        not torch.compiler.is_compiling()  # first: the rest would specialise a graph on shapes
        and not torch.is_grad_enabled()
        and x.dim() in (2, 3)
        and (x.dim() == 2 or x.shape[1] == 1)
        and x.numel() <= FEW_ROWS * x.shape[-1]
        and x.numel() > 0
        and is_stored(x, x.dtype)
        and x.dtype in _STORED
        and not is_in_torch_dispatch_mode()
        and torch._C._functorch.peek_interpreter_stack() is None  # vmap and other transforms
        and not torch.is_autocast_enabled("cpu")
        and why_not() is None
    )


def is_stored(x: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether native code can read a tensor in place: contiguous CPU memory of this dtype."""
    return x is None or (x.dtype is dtype and type(x) in _PLAIN and x.is_cpu and x.is_contiguous())


def few_rows_product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, isa: str = "auto"
) -> Tensor:
    """Products of rows with a matrix: x W^T + bias.

    Args:
        x: at most ``FEW_ROWS`` rows, ``[..., in]``, contiguous.
        weight: ``[out, in]``, contiguous, in the dtype of x.
        bias: ``[out]``, in the same dtype.
        isa: instruction set, for tests.

    Returns:
        ``[..., out]``.
    """
    y = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
    rows = x.numel() // x.shape[-1]
    params = _PRODUCT.pack(
        *(ABI_VERSION, ISA[isa], torch.get_num_threads(), DTYPES[x.dtype], rows),
        *_matrix(weight, bias),
        *(x.data_ptr(), y.data_ptr()),
    )
    check(load().kla_product(params))
    return y


def layer_step(
    tokens: LayerTokens,
    weights: LayerWeights,
    options: LayerOptions,
    a_bar: Tensor,
    p_bar: Tensor,
    mask: Tensor | None = None,
    step_bias: Tensor | None = None,
    *,
    isa: str = "auto",
) -> LayerTokens:
    """One token per row through a KLA layer, with the norm before it and the residual around it.

    Args:
        tokens: at most ``FEW_ROWS`` rows with their state; contiguous, like all arguments.
        weights: in the dtype of the tokens.
        options: options of the layer.
        a_bar: decay per token, ``[G, D]`` float32.
        p_bar: process-noise variance per token, ``[G, D]`` float32. If tokens choose their steps,
            both are rates and limits instead (``scan.rates``).
        mask: ``[R]`` bool, False where a row has no token.
        step_bias: bias of the steps that tokens choose, ``[D]`` float32.
        isa: instruction set, for tests.

    Returns:
        x + layer(norm(x)), or layer(x) without a norm, and the new state.
    """
    x, window, mean, variance = tokens
    out = LayerTokens(*map(torch.empty_like, tokens))
    (R, N, D), G, taps = mean.shape, variance.shape[1], weights.conv_weight
    others = D if weights.precision_up is None else weights.precision_up.shape[1]
    others += 2 * N + (0 if weights.step_up is None else weights.step_up.shape[1])
    projected = weights.evidence_proj.shape[0] == D + others
    params = _LAYER.pack(
        *(ABI_VERSION, ISA[isa], torch.get_num_threads(), DTYPES[x.dtype], R, N, G, D),
        *(0 if taps is None else taps.shape[0], projected, options.qk_norm, LINKS[options.link]),
        *options[2:],
        *(at(weights.norm), *_matrix(weights.in_proj, weights.in_bias)),
        *(at(taps), at(weights.conv_bias)),
        *_matrix(weights.evidence_proj, weights.evidence_bias),
        *_matrix(weights.precision_up, weights.precision_bias),
        *(*_matrix(weights.step_up, None), at(step_bias)),
        *(at(weights.gate_bias), at(weights.skip), at(weights.readout_norm)),
        *_matrix(weights.out_proj, weights.out_bias),
        *(a_bar.data_ptr(), p_bar.data_ptr(), at(mask)),
        *(x.data_ptr(), window.data_ptr(), mean.data_ptr(), variance.data_ptr()),
        *(z.data_ptr() for z in out),
    )
    check(load().kla_layer_step(params))
    return out


def _matrix(weight: Tensor | None, bias: Tensor | None) -> tuple[int, int, int, int]:
    return _NO_MATRIX if weight is None else (weight.data_ptr(), at(bias), *weight.shape)
