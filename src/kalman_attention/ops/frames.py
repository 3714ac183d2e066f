"""``into_frames``: keys and queries in the rotating frame (``filtering/rotation.py``).

A filter in which every token rotates the blocks of slots is ``kla_scan`` on the keys and queries
that ``into_frames`` returns. Frames are always computed in float64, so that they stay orthogonal
over any length; they depend neither on the width nor on the belief. On CPU tensors one native pass
in each direction writes the rotated keys and queries and keeps only the last frame. Other devices
use plain torch operations.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kalman_attention._text import unknown
from kalman_attention._typing import Keys, Mask
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.rotation import into_frame, reflect, rotation
from kalman_attention.ops import checks
from kalman_attention.ops.contract import FrameInputs, own_types
from kalman_attention.ops.cpu import library
from kalman_attention.ops.cpu.frames import MAX_SLOTS, frames_backward, frames_forward

NATIVE, PLAIN = "cpu", "torch"
_MISSING = library.why_not()
# Products run in sequence inside a chunk and from chunk to chunk, all else runs in parallel: chunks
# of 64 take 64 + T / 64 steps.
_CHUNK = 64


class Turned(NamedTuple):
    """Keys and queries in the rotating frame, and the last frame.

    Attributes:
        q: rotated queries, ``[B, T, N]``, at least float32; 0 at padding.
        k: rotated keys, in the same form.
        frame: Q after each row's last real token, ``[R, G, m, m]`` float64. The belief about the
            latent itself has the mean Q mu; the next call starts from that belief, with Q = 1.
    """

    q: Keys
    k: Keys
    frame: Tensor

    def out_of_frame(self, state: KLAState) -> KLAState:
        """Convert a belief in the frame to one about the latent: mean Q mu, same variance."""
        blocks = torch.unflatten(state.mean, 1, self.frame.shape[1:3])  # [R, G, m, D]
        with own_types(blocks):
            mean = (self.frame.to(blocks.dtype) @ blocks).flatten(1, 2)
        return KLAState(mean, state.variance)


def turn_belief(state: KLAState, u_h: Tensor, mask: Mask | None = None) -> KLAState:
    """Rotate a belief by one token, before the token is observed: mean U mu, same variance.

    Args:
        state: mean ``[B, N, D]`` and variance ``[B, G, D]``.
        u_h: reflections of the token, ``[B, n_h, G, m]``.
        mask: ``[B]`` bool, False where a row has no token.
    """
    before = torch.unflatten(state.mean, 1, u_h.shape[2:])  # [B, G, m, D]
    with own_types(before):
        mean = reflect(u_h.to(before.dtype), before).flatten(1, 2)
    if mask is not None:
        mean = torch.where(mask[:, None, None], mean, state.mean)
    return KLAState(mean, state.variance)


def into_frames(
    q: Keys,
    k: Keys,
    u_h: Tensor,
    *,
    mask: Mask | None = None,
    cu_seqlens: Tensor | None = None,
    engine: str = "auto",
) -> Turned:
    """Rotate keys and queries into the frame that rotates with the latent; exact gradients.

    Args:
        q: queries, ``[B, T, N]``.
        k: keys, ``[B, T, N]``.
        u_h: directions of the n_h reflections of each token, in the order of application, for G
            blocks of m slots, ``[B, T, n_h, G, m]`` with N = G m. Their length does not matter; a
            direction of 0 reflects nothing.
        mask: ``[B, T]`` bool, False for padding, which rotates nothing.
        cu_seqlens: document boundaries in one packed row (B = 1), ``[n + 1]`` int; each document
            starts with Q = 1.
        engine: ``"auto"``, ``"cpu"`` or ``"torch"``.

    Returns:
        ``Turned(q, k, frame)``.
    """
    call = _check(q, k, u_h, mask, cu_seqlens)
    if _resolve(engine, q.device, u_h.shape[-1]) == PLAIN:
        return _plain(call)
    return Turned(*_turn(*call))


def _resolve(engine: str, device: torch.device, m: int) -> str:
    reason = _MISSING
    if device.type != "cpu":
        reason = f"it runs on cpu tensors, these are on {device.type}"
    elif m > MAX_SLOTS:
        reason = f"it rotates blocks of at most {MAX_SLOTS} slots, these have {m}"
    if engine == "auto":
        return NATIVE if reason is None else PLAIN
    if engine not in (NATIVE, PLAIN):
        raise ValueError(unknown("engine", engine, ("auto", NATIVE, PLAIN)))
    if engine == NATIVE and reason is not None:
        raise ValueError(f"engine 'cpu' cannot serve this call: {reason}. engine='torch' can.")
    return engine


def _check(
    q: Keys, k: Keys, u_h: Tensor, mask: Mask | None, cu_seqlens: Tensor | None
) -> FrameInputs:
    checks.require_shape("k", k, "[B, T, N]", (None, None, None))
    B, T, N = k.shape
    checks.require_shape("q", q, "[B, T, N]", (B, T, N), "k", k)
    fits = isinstance(u_h, Tensor) and u_h.dim() == 5 and u_h.shape[:2] == (B, T)
    if not fits or u_h.shape[3] * u_h.shape[4] != N or N == 0:
        got = list(u_h.shape) if isinstance(u_h, Tensor) else type(u_h).__name__
        raise ValueError(
            f"u_h is {got} but must be [B, T, n_h, G, m] with G m = N slots in blocks of m (k is "
            f"{list(k.shape)}): one direction per token, reflection and block."
        )
    if cu_seqlens is not None:
        checks.require_packing(k, mask, cu_seqlens)
    if mask is not None:
        checks.require_mask(mask, (B, T), "[B, T]")
    dtype = checks.require_token_dtypes(k=k, q=q, u_h=u_h)
    checks.require_device("k", k, q=q, u_h=u_h, mask=mask)
    return FrameInputs(q.to(dtype), k.to(dtype), u_h.to(dtype), mask, cu_seqlens)


def _plain(call: FrameInputs) -> Turned:
    """The same in torch operations: prefix products of rotations in float64."""
    q, k, u_h, mask, cu_seqlens = call
    G, m = call.frame_shape[1:3]
    # Float64: rounding errors of float32 would make the product of many rotations drift from
    # orthogonality.
    u_h = u_h.double().transpose(2, 3)  # [B, T, G, n_h, m]
    if mask is not None:  # padding may contain anything, even NaN
        u_h = u_h.masked_fill(~mask[:, :, None, None, None], 0.0)
        q, k = (x.masked_fill(~mask.unsqueeze(-1), 0.0) for x in (q, k))
    Q = _prefix_products(rotation(u_h))  # [B, T, G, m, m]
    one = torch.eye(m, dtype=Q.dtype, device=Q.device)
    Q = torch.cat([one.expand(len(Q), 1, G, m, m), Q], 1)  # the frame before each token, then last
    if cu_seqlens is None:
        last = Q[:, -1]
        Q = Q[:, 1:]
    else:
        Q, last = _documents(Q[0], cu_seqlens.to(q.device))
    turned = [into_frame(Q, torch.unflatten(x, -1, (G, m)).double()).flatten(2) for x in (q, k)]
    return Turned(turned[0].to(q.dtype), turned[1].to(k.dtype), last)


def _documents(Q: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Frames of every document, from those of the packed row, and the last frame of each.

    The tokens before a document have rotated the row by Q_s, so Q_t Q_s^T is the frame of its own.
    """
    bounds = cu_seqlens.to(torch.int64)
    token = torch.arange(len(Q) - 1, device=Q.device)
    start = bounds[torch.bucketize(token, bounds[1:], right=True)]
    return (Q[1:] @ Q[start].mT).unsqueeze(0), Q[bounds[1:]] @ Q[bounds[:-1]].mT


def _prefix_products(U: Tensor) -> Tensor:
    """Q_t = U_t ... U_1 of ``[B, T, G, m, m]``: chunks in parallel, then combined in sequence."""
    B, T, G, m, _ = U.shape
    size = min(T, _CHUNK) or 1
    chunks = -(-T // size)
    one = torch.eye(m, dtype=U.dtype, device=U.device)
    U = torch.cat([U, one.expand(B, chunks * size - T, G, m, m)], 1)
    # First the products inside all chunks in parallel, then those of the chunks before each.
    inner = [one.expand(B, chunks, G, m, m)]
    for U_t in torch.unflatten(U, 1, (chunks, size)).unbind(2):
        inner.append(U_t @ inner[-1])
    before = [one.expand(B, G, m, m)]
    for whole in inner[-1].unbind(1):
        before.append(whole @ before[-1])
    found = torch.stack(inner[1:], 2) @ torch.stack(before, 1)[:, :chunks].unsqueeze(2)
    return found.flatten(1, 2)[:, :T]


@torch.library.custom_op("kalman_attention::into_frames", mutates_args=())
def _turn(
    q: Tensor, k: Tensor, u_h: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if cu_seqlens is not None:
        checks.check_bounds(cu_seqlens, q.shape[1])
    return frames_forward(FrameInputs(q, k, u_h, mask, cu_seqlens))


@_turn.register_fake
def _turn_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = FrameInputs(*args)
    frame = call.q.new_empty(call.frame_shape, dtype=torch.float64)
    return call.q.new_empty(call.q.shape), call.k.new_empty(call.k.shape), frame


@torch.library.custom_op("kalman_attention::into_frames_backward", mutates_args=())
def _turn_backward(
    q: Tensor,
    k: Tensor,
    u_h: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    frame: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dframe: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    call = FrameInputs(q, k, u_h, mask, cu_seqlens)
    found = frames_backward(call, frame, dq, dk, dframe)
    return found.q, found.k, found.u_h


@_turn_backward.register_fake
def _turn_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in args[:3])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, output[2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    found = _turn_backward(*ctx.saved_tensors, *grads)
    wanted = zip(found, ctx.needs_input_grad, strict=False)
    return (*(grad if needed else None for grad, needed in wanted), None, None)


def _refuse_second_order(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "into_frames is differentiable once. For second derivatives use engine='torch', which "
        "uses plain torch operations only."
    )


_turn.register_autograd(_differentiate, setup_context=_setup)
_turn_backward.register_autograd(_refuse_second_order)
