"""The matrix memory of the baselines: one native pass forward, one backward."""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention.ops.contract import CHUNK, DTYPES, NO_ARRAY, array, at, dense
from kalman_attention.ops.cpu.library import ABI_VERSION, ISA, check, load

_PARAMS = struct.Struct("=36q")
_GRADS = struct.Struct("=11q")


class MemoryInputs(NamedTuple):
    """Arguments of ``matrix_scan``, all float32 or all float64, on the CPU.

    Attributes:
        q: queries, ``[B, T, H, K]``.
        k: keys, of the same shape.
        v: values, ``[B, T, H, V]``.
        alpha: decays, ``[B, T, H, K]`` or ``[B, T, H, 1]``.
        state: initial state, ``[B, H, K, V]``.
        beta: rates, ``[B, T, H]``, or None for 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    state: Tensor
    beta: Tensor | None

    def new_saved(self, delta: bool) -> "Saved":
        """Arrays for what a forward pass saves."""
        residual = self.v.shape if delta else (0,)
        return Saved(self.state.new_empty(self.checkpoint_shape), self.v.new_empty(residual))

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """Shape of the states before each chunk, ``[B, H, chunks, K, V]``."""
        B, H, K, V = self.state.shape
        return B, H, -(-self.q.shape[1] // CHUNK), K, V


class Saved(NamedTuple):
    """What a forward pass saves for the backward pass.

    Attributes:
        checkpoints: the states before each chunk, ``[B, H, chunks, K, V]``.
        residual: v - D^T k of every token, ``[B, T, H, V]``; empty without the delta rule.
    """

    checkpoints: Tensor
    residual: Tensor


class MemoryGrads(NamedTuple):
    """Gradients with respect to the inputs, in their shapes."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    state: Tensor
    beta: Tensor | None


def memory_forward(
    inputs: MemoryInputs, *, delta: bool, save: bool, isa: str = "auto"
) -> tuple[Tensor, Tensor, Saved | None]:
    """Run every row and head.

    Args:
        inputs: validated arguments.
        delta: use the delta rule.
        save: save what ``memory_backward`` needs.
        isa: instruction set, for tests.

    Returns:
        Outputs ``[B, T, H, V]``, final states and what was saved.
    """
    call = _laid_out(inputs)
    y = torch.empty(call.v.shape, dtype=call.v.dtype)
    state = torch.empty_like(call.state)
    saved = call.new_saved(delta) if save else None
    check(load().kla_memory_forward(_pack(call, delta, isa, y, state, saved)))
    return y, state, saved


def memory_backward(
    inputs: MemoryInputs,
    saved: Saved,
    dy: Tensor | None,
    dstate: Tensor | None,
    *,
    delta: bool,
    isa: str = "auto",
) -> MemoryGrads:
    """Backward pass of ``memory_forward``.

    Args:
        inputs: the arguments of the forward pass.
        saved: what it saved.
        dy: gradient with respect to y; None means 0.
        dstate: gradient with respect to the final state; None means 0.
        delta: as in the forward pass.
        isa: instruction set, for tests.
    """
    call = _laid_out(inputs)
    grads = MemoryGrads(
        *(None if x is None else torch.empty(x.shape, dtype=x.dtype) for x in call)  # type: ignore[arg-type]
    )
    dtype = call.q.dtype
    dy = None if dy is None else _heads(dy.to(dtype))
    dstate = None if dstate is None else dense(dstate, dtype)
    saved = Saved(*(x.contiguous() for x in saved))  # may be copies in another layout
    params = _pack(call, delta, isa, None, None, saved)
    dq, dk, dv, dalpha, dstate_0, dbeta = grads
    written = (dq, dk, dv, dalpha, dbeta, dstate_0)  # in the order of the struct
    packed = _GRADS.pack(*array(dy), at(dstate), *(at(x) for x in written))
    check(load().kla_memory_backward(params, packed))
    return grads


def _laid_out(call: MemoryInputs) -> MemoryInputs:
    """The same values in the layout that the kernel reads; copies only where necessary."""
    q, k, v, alpha = (_heads(x) for x in call[:4])
    beta = call.beta
    if beta is not None and beta.stride(-1) != 1:
        beta = beta.contiguous()
    return MemoryInputs(q, k, v, alpha, call.state.contiguous(), beta)


def _heads(x: Tensor) -> Tensor:
    """``[B, T, H, *]`` with the two last axes contiguous."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()


def _pack(
    call: MemoryInputs,
    delta: bool,
    isa: str,
    y: Tensor | None,
    state: Tensor | None,
    saved: Saved | None,
) -> bytes:
    q, k, v, alpha, state_0, beta = call
    (B, T, H, K), V = q.shape, v.shape[3]
    return _PARAMS.pack(
        *(ABI_VERSION, ISA[isa], torch.get_num_threads(), DTYPES[q.dtype]),
        *(B, T, H, K, V, alpha.shape[3], int(delta)),
        *(*array(q), *array(k), *array(v), *array(alpha)),
        *(NO_ARRAY if beta is None else array(beta)),
        *(at(state_0), at(y), at(state)),
        *((0, 0) if saved is None else (at(saved.checkpoints), at(saved.residual))),
    )
