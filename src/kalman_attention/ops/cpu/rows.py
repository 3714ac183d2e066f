"""Passes over the rows of a tensor, one forward and one backward: softplus links and the RMS norm.

As torch operations they are up to a dozen passes, which wait for memory.
"""

import struct
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kalman_attention.ops.contract import DTYPES, at
from kalman_attention.ops.cpu.library import ABI_VERSION, ISA, check, load, why_not

_SOFTPLUS = struct.Struct("=10q2d1q")
_NORM = struct.Struct("=9q1d1q")
_GRADS = struct.Struct("=3q")


def can_fuse(x: Tensor, vector: Tensor | None = None) -> bool:
    """Whether native code can take x, float32 or bfloat16, and a float32 bias or gain.

    They must be plain CPU tensors, outside of compilers, dispatch modes and transforms.
    """
    return (
        not torch.compiler.is_compiling()  # first: the rest would specialise a graph on shapes
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.dim() > 0
        and x.shape[-1] > 0
        and (vector is None or vector.dtype is torch.float32)
        and all(
            z is None or (type(z) in (Tensor, torch.nn.Parameter) and z.is_cpu) for z in (x, vector)
        )
        and not is_in_torch_dispatch_mode()
        and torch._C._functorch.peek_interpreter_stack() is None  # vmap and other transforms
        and why_not() is None
    )


def torch_gradients(
    function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor | None
) -> Iterator[Tensor | None]:
    """Gradients by torch operations, for gradients that are differentiated again.

    Args:
        function: the same function in torch operations.
        dy: gradient with respect to its result.
        inputs: its arguments.

    Returns:
        One gradient for each argument, None where it needs none.
    """
    needed = [x is not None and x.requires_grad for x in inputs]
    wanted = [x for x, asked in zip(inputs, needed, strict=True) if x is not None and asked]
    found = iter(torch.autograd.grad(function(*inputs), wanted, dy, create_graph=True))
    return (next(found) if asked else None for asked in needed)


def softplus_forward(
    x: Tensor,
    bias: Tensor | None,
    *,
    floor: float,
    scale: float,
    inverse: bool,
    isa: str = "auto",
) -> Tensor:
    """Compute scale (softplus(x + bias) + floor), or scale divided by the bracket.

    Args:
        x: ``[..., D]``, float32 or bfloat16.
        bias: ``[D]`` or None.
        floor: added to softplus.
        scale: factor, or numerator.
        inverse: divide by the bracket.
        isa: instruction set, for tests.

    Returns:
        ``[..., D]`` float32.
    """
    y = torch.empty(x.shape)
    flat, bias = _rows(x), None if bias is None else bias.contiguous()
    check(load().kla_softplus_forward(_pack_softplus(flat, bias, floor, scale, inverse, y, isa)))
    return y


def softplus_backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    y: Tensor,
    *,
    floor: float,
    scale: float,
    inverse: bool,
    isa: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Backward pass of ``softplus_forward``.

    Args:
        dy: gradient with respect to y, ``[..., D]``.
        x: as in the forward pass, like the arguments that follow.
        bias: ``[D]`` or None.
        y: its result.
        floor: as in the forward pass.
        scale: as in the forward pass.
        inverse: as in the forward pass.
        isa: instruction set, for tests.

    Returns:
        Gradients with respect to x, in its dtype, and to the bias.
    """
    dy, flat, bias = dy.float().contiguous(), _rows(x), None if bias is None else bias.contiguous()
    dx, dbias = (
        torch.empty(x.shape, dtype=x.dtype),
        None if bias is None else torch.empty_like(bias),
    )
    params = _pack_softplus(flat, bias, floor, scale, inverse, y, isa)
    check(load().kla_softplus_backward(params, _GRADS.pack(at(dy), at(dx), at(dbias))))
    return dx, dbias


def norm_forward(x: Tensor, weight: Tensor | None, eps: float, *, isa: str = "auto") -> Tensor:
    """Divide by the root mean square over the last axis and multiply by a gain.

    Args:
        x: ``[..., D]``, float32 or bfloat16.
        weight: the gain, ``[D]``, or None for 1.
        eps: added to the mean square.
        isa: instruction set, for tests.

    Returns:
        ``[..., D]`` in the dtype of x.
    """
    y = _like(x)
    flat, weight = _rows(x), None if weight is None else weight.contiguous()
    check(load().kla_norm_forward(_pack_norm(flat, weight, eps, y, isa)))
    return y


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, *, isa: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Backward pass of ``norm_forward``.

    Args:
        dy: gradient with respect to y, ``[..., D]``.
        x: as in the forward pass, like the arguments that follow.
        weight: the gain, ``[D]``, or None.
        eps: added to the mean square.
        isa: instruction set, for tests.

    Returns:
        Gradients with respect to x, in its dtype, and to the gain.
    """
    dy, flat = dy.to(x.dtype).contiguous(), _rows(x)
    weight = None if weight is None else weight.contiguous()
    dx, dweight = _like(x), None if weight is None else torch.empty_like(weight)
    params = _pack_norm(flat, weight, eps, None, isa)
    check(load().kla_norm_backward(params, _GRADS.pack(at(dy), at(dx), at(dweight))))
    return dx, dweight


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def _rows(x: Tensor) -> Tensor:
    """``[rows, D]`` with neighbouring entries in a row; a copy only if there is no such view."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _pack_softplus(
    x: Tensor, bias: Tensor | None, floor: float, scale: float, inverse: bool, y: Tensor, isa: str
) -> bytes:
    return _SOFTPLUS.pack(
        *(ABI_VERSION, ISA[isa], torch.get_num_threads(), DTYPES[x.dtype], *x.shape),
        *(at(x), x.stride(0), at(bias), int(inverse), floor, scale, at(y)),
    )


def _pack_norm(x: Tensor, weight: Tensor | None, eps: float, y: Tensor | None, isa: str) -> bytes:
    return _NORM.pack(
        *(ABI_VERSION, ISA[isa], torch.get_num_threads(), DTYPES[x.dtype], *x.shape),
        *(at(x), x.stride(0), at(weight), eps, at(y)),
    )
