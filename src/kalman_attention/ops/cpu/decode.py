"""Decoding on a CPU: products of a few rows with a matrix, and one token per row through a layer.

Both are bound by reading the weights. They lie as ``nn.Linear`` stores them, float32 or bfloat16;
arithmetic is float32.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kalman_attention.ops.contract import DTYPES, at
from kalman_attention.ops.cpu.library import ABI_VERSION, ISA, check, load, why_not

FEW_ROWS = 4
"""Most rows of a call: beyond, a matrix is used often enough for torch's own products."""

LINKS = {"inverse_softplus": 0, "softplus": 1, "exp": 2}
"""Codes of ``csrc/kla_decode.h`` for the links of a precision."""

_STORED = (torch.float32, torch.bfloat16)
_PLAIN = (Tensor, torch.nn.Parameter)
_PRODUCT = struct.Struct("=11q")
_LAYER = struct.Struct("=12q3d29q")


class LayerWeights(NamedTuple):
    """What a KLA layer learned, in one dtype; dynamics in float32.

    Attributes:
        norm: gain of the norm before the layer, ``[d_model]``; None for no norm and no residual.
        in_proj: stream and gate, ``[2 D, d_model]``.
        in_bias: of that projection.
        conv_weight: taps, ``[K, D]``; None without a convolution.
        conv_bias: ``[D]``.
        evidence_proj: value (if projected), precision, key and query, ``[.., D]``.
        evidence_bias: of that projection.
        gate_bias: ``[D]``.
        skip: ``[D]``.
        readout_norm: gain, ``[D]``.
        out_proj: ``[d_model, D]``.
        out_bias: of that projection.
    """

    norm: Tensor | None
    in_proj: Tensor
    in_bias: Tensor | None
    conv_weight: Tensor | None
    conv_bias: Tensor | None
    evidence_proj: Tensor
    evidence_bias: Tensor | None
    gate_bias: Tensor | None
    skip: Tensor | None
    readout_norm: Tensor | None
    out_proj: Tensor
    out_bias: Tensor | None


class LayerOptions(NamedTuple):
    """What a KLA layer is, as far as its weights do not say.

    Attributes:
        qk_norm: keys and queries have length 1.
        link: of the precision, a key of ``LINKS``.
        floor: of the link.
        norm_eps: of the norm before the layer.
        readout_eps: of the norm of the read-out.
    """

    qk_norm: bool
    link: str
    floor: float
    norm_eps: float
    readout_eps: float


class LayerTokens(NamedTuple):
    """Tokens and state of a call, or what comes out of it.

    Attributes:
        x: ``[R, d_model]``.
        window: tokens that the convolution saw before, ``[R, K - 1, D]``.
        mean: ``[R, N, D]``.
        variance: ``[R, G, D]``.
    """

    x: Tensor
    window: Tensor
    mean: Tensor
    variance: Tensor


def can_decode(x: Tensor) -> bool:
    """Whether x is for native code: ``[R, d]`` or ``[R, 1, d]``, few rows, nothing to trace.

    No gradient, no compiler and no autocast, which keep to torch operations.
    """
    return (
        not torch.compiler.is_compiling()  # first: what follows would specialise a graph on shapes
        and not torch.is_grad_enabled()
        and x.dim() in (2, 3)
        and (x.dim() == 2 or x.shape[1] == 1)
        and x.numel() <= FEW_ROWS * x.shape[-1]
        and x.numel() > 0
        and is_stored(x, x.dtype)
        and x.dtype in _STORED
        and not is_in_torch_dispatch_mode()
        and torch._C._functorch.peek_interpreter_stack() is None  # vmap and its kin
        and not torch.is_autocast_enabled("cpu")
        and why_not() is None
    )


def is_stored(x: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether native code can read a tensor as it lies: contiguous in memory, of this dtype."""
    return x is None or (x.dtype is dtype and type(x) in _PLAIN and x.is_cpu and x.is_contiguous())


def few_rows_product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, isa: str = "auto"
) -> Tensor:
    """Products of rows with a matrix: x W^T + bias.

    Args:
        x: at most ``FEW_ROWS`` rows, ``[..., in]``, contiguous.
        weight: ``[out, in]``, contiguous, in the dtype of x.
        bias: ``[out]``, of the same kind.
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
    *,
    isa: str = "auto",
) -> LayerTokens:
    """One token per row through a KLA layer, with the norm before it and the residual around it.

    Args:
        tokens: at most ``FEW_ROWS`` rows with their state; contiguous, like all that follows.
        weights: in the dtype of the tokens.
        options: what the layer is.
        a_bar: decay per token, ``[G, D]`` float32.
        p_bar: process-noise variance per token, ``[G, D]`` float32.
        mask: ``[R]`` bool, False where a row has no token.
        isa: instruction set, for tests.

    Returns:
        x + layer(norm(x)), or layer(x) without a norm, and the new state.
    """
    x, window, mean, variance = tokens
    out = LayerTokens(*map(torch.empty_like, tokens))
    (R, N, D), G, taps = mean.shape, variance.shape[1], weights.conv_weight
    projected = weights.evidence_proj.shape[0] == 2 * D + 2 * N
    params = _LAYER.pack(
        *(ABI_VERSION, ISA[isa], torch.get_num_threads(), DTYPES[x.dtype], R, N, G, D),
        *(0 if taps is None else taps.shape[0], projected, options.qk_norm, LINKS[options.link]),
        *options[2:],
        *(at(weights.norm), *_matrix(weights.in_proj, weights.in_bias)),
        *(at(taps), at(weights.conv_bias)),
        *_matrix(weights.evidence_proj, weights.evidence_bias),
        *(at(weights.gate_bias), at(weights.skip), at(weights.readout_norm)),
        *_matrix(weights.out_proj, weights.out_bias),
        *(a_bar.data_ptr(), p_bar.data_ptr(), at(mask)),
        *(x.data_ptr(), window.data_ptr(), mean.data_ptr(), variance.data_ptr()),
        *(z.data_ptr() for z in out),
    )
    check(load().kla_layer_step(params))
    return out


def _matrix(weight: Tensor, bias: Tensor | None) -> tuple[int, int, int, int]:
    return weight.data_ptr(), at(bias), *weight.shape
