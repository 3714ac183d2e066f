"""The short causal convolution of a layer: one native pass forward, one backward.

In torch operations every tap is a pass over the sequence, which at 16,384 tokens takes more than
twice the processor time, because no cache holds the tensors.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention.ops.contract import at, rows
from kalman_attention.ops.cpu.library import ABI_VERSION, check, load, why_not

_PARAMS = struct.Struct("=13q")
_GRADS = struct.Struct("=7q")


class ConvGrads(NamedTuple):
    """Gradients with respect to the four inputs, in their shapes."""

    x: Tensor
    window: Tensor
    weight: Tensor
    bias: Tensor


def can_convolve(*tensors: Tensor) -> bool:
    """Whether the native convolution can take these in float32: plain CPU tensors, no float64."""
    for x in tensors:
        if x.dtype is torch.float64 or x.device.type != "cpu":
            return False
        if type(x) not in (Tensor, torch.nn.Parameter):
            return False  # a traced or wrapped tensor has no memory to read
    return why_not() is None


def conv_forward(x: Tensor, window: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve: y_t = bias + sum_j weight[j] x_{t - K + 1 + j}.

    Args:
        x: ``[B, T, D]``.
        window: the tokens before x, ``[B, K - 1, D]``.
        weight: ``[K, D]``.
        bias: ``[D]``.

    Returns:
        y ``[B, T, D]``.
    """
    y = torch.empty(x.shape)
    x, window, weight, bias = rows(x), window.contiguous(), weight.contiguous(), bias.contiguous()
    check(load().kla_conv_forward(_pack(x, window, weight, bias, y)))
    return y


def conv_backward(dy: Tensor, x: Tensor, window: Tensor, weight: Tensor) -> ConvGrads:
    """Backward pass of ``conv_forward``.

    Args:
        dy: gradient with respect to y, ``[B, T, D]``.
        x: as in the forward pass, like the arguments that follow.
        window: ``[B, K - 1, D]``.
        weight: ``[K, D]``.

    Returns:
        Gradients in the shapes of the inputs.
    """
    dy, x, window, weight = rows(dy), rows(x), window.contiguous(), weight.contiguous()
    shapes = (x.shape, window.shape, weight.shape, weight.shape[1:])
    grads = ConvGrads(*(torch.empty(shape) for shape in shapes))
    params = _pack(x, window, weight, None, None)
    packed = _GRADS.pack(at(dy), *dy.stride()[:2], *(at(g) for g in grads))
    check(load().kla_conv_backward(params, packed))
    return grads


def _pack(
    x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor | None
) -> bytes:
    (B, T, D), K = x.shape, weight.shape[0]
    return _PARAMS.pack(
        *(ABI_VERSION, torch.get_num_threads(), B, T, D, K),
        *(at(x), *x.stride()[:2], at(window), at(weight), at(bias), at(y)),
    )
