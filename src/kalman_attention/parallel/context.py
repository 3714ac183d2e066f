r"""Context parallelism: one sequence, split over ranks, filtered as if it were whole.

Every rank holds a contiguous piece of the sequence. Layers that work token by token need no change.
A KLA layer needs other pieces at two or three points, each time by one exchange of fixed size:

**The convolution** needs the last K - 1 tokens before the piece. Every rank sends its own last
ones, and each assembles those that precede it; a piece may be shorter than that, or empty.

**The scan.** The effect of a piece on any belief that enters it is determined by five numbers per
slot and channel (``filtering/segment.py``). The ranks gather these summaries. With (s_0, mu_0) the
belief before the whole sequence, rank r applies the maps of ranks 0 ... r - 1 to it, in order,

.. math:: s \leftarrow s_i + \frac{A_i^2 s}{1 + J_i s}, \qquad
          \mu \leftarrow \mu_i + \frac{A_i (\mu + s \eta_i)}{1 + J_i s},

and runs the ordinary fused scan from there. Only the belief that enters a piece comes from
summaries.

**Frames.** Where tokens rotate the latent, the total rotation of each piece is gathered, one small
orthogonal matrix per block of slots, and keys and queries are rotated by those of all pieces
before.

**Backward.** Given the beliefs, gradients with respect to the belief after piece i become gradients
with respect to the belief before it by an affine map,

.. math:: d\mu \leftarrow g_i\, d\mu + c_i, \qquad ds \leftarrow g_i^2\, ds + x_i\, d\mu + c'_i,

four numbers per slot and channel, where c and c' come from the gradients with respect to the
outputs of the piece. The ranks gather them, rank r applies those of the last rank down to r + 1,
starting from 0, and runs the ordinary backward pass with the result as the gradient of its final
belief. The gradients are exactly those of the whole sequence; the composed maps, which tend to rank
one, are never differentiated.

For what all ranks share (weights, the initial belief) each rank has a part of the gradient, and the
sum over ranks is the gradient. That of the initial belief comes from rank 0 alone.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from kalman_attention._typing import Dynamics, Keys, Mask, Precisions, Values
from kalman_attention.filtering.blocks import to_blocks
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.rotation import into_frame
from kalman_attention.filtering.segment import AdjointMap, FilterMap
from kalman_attention.models.block import Block
from kalman_attention.nn.kla import KLA
from kalman_attention.ops.checks import check_scan
from kalman_attention.ops.contract import ScanInputs, ScanOutput, own_types
from kalman_attention.ops.engines import ENGINES, REFERENCE, resolve
from kalman_attention.ops.frames import Turned
from kalman_attention.ops.kla_scan import scan as scan_op
from kalman_attention.ops.kla_scan import scan_backward
from kalman_attention.parallel.exchange import RankGroup, gather_with_gradient

Map = TypeVar("Map", FilterMap, AdjointMap)


class RankContext:
    """Connects the KLA layers of this rank with those of the other pieces (``nn.mixer.Context``).

    Args:
        group: the ranks that share sequences, in the order of their pieces.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def window(
        self, x: Tensor, window: Tensor, mask: Mask | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """The last K - 1 tokens before this piece.

        Args:
            x: the piece, ``[B, T, D]``.
            window: the tokens before the whole sequence, ``[B, K - 1, D]``.
            mask: mask of the piece, ``[B, T]``.
            cu_seqlens: must be None.
        """
        _refuse_packing(cu_seqlens)
        W = window.shape[1]
        if W == 0:
            return window
        tail, held = _tail(x, mask, W)
        offered = gather_with_gradient(torch.cat([tail, held.to(x.dtype)], -1), self.group)
        window = window.to(x.dtype)
        place = torch.arange(W, device=x.device).view(1, W, 1)
        for i, piece in enumerate(offered):
            tail, held = piece[..., :-1], piece[..., -1:]
            # Treat later pieces as empty instead of skipping them, so that every rank takes part in
            # the backward exchange.
            count = held.sum(1, keepdim=True).long() * (i < self.group.rank)  # [B, 1, 1]
            moved = window.gather(1, (place + count).clamp(max=W - 1).expand_as(window))
            window = torch.where(place < W - count, moved, tail)
        return window

    def frames(self, turned: Turned) -> Turned:
        """Keys and queries in the frame of the whole sequence, from those of the piece alone.

        With Q the total rotation of all pieces before, the frame after token t is Q_t Q, so keys
        and queries become Q^T (Q_t^T k).

        Args:
            turned: computed as if the piece were the whole sequence.
        """
        offered = gather_with_gradient(turned.frame, self.group)
        one = torch.eye(turned.frame.shape[-1], dtype=offered.dtype, device=offered.device)
        before = one.expand_as(turned.frame)
        for i, frame in enumerate(offered):
            # Later pieces count as the identity, so that every rank takes part in the backward
            # exchange.
            earlier = torch.full((), i < self.group.rank, device=offered.device)
            before = torch.where(earlier, frame, one) @ before
        q, k = (_turned_by(before, x) for x in (turned.q, turned.k))
        return Turned(q, k, turned.frame @ before)

    def scan(
        self,
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
        """``kla_scan`` over the whole sequence, called with one piece of it.

        Args:
            q: queries of the piece, ``[B, T, N]``; T may be 0, and may differ between ranks.
            k: keys, ``[B, T, N]``.
            v: values, ``[B, T, D]``.
            lam_v: their precisions.
            a_bar: decay per token, ``[N, D]``, or ``[G, D]`` for blocks of slots.
            p_bar: process-noise variance per token, in the shape of a_bar.
            dt: time that passes before each token of the piece, as for ``kla_scan``.
            state: belief before the whole sequence, the same on every rank; None for the prior.
            mask: ``[B, T]`` bool, False for padding.
            cu_seqlens: must be None.
            return_variance: also compute ``y_var``.
            acc_dtype: dtype of the arithmetic, the same on every rank; None as for ``kla_scan``.
            engine: as for ``kla_scan``, except the reference, which has no summaries.

        Returns:
            ``ScanOutput(y, y_var, state)`` of the piece; the state is the belief after it.
        """
        _refuse_packing(cu_seqlens)
        inputs = check_scan(q, k, v, lam_v, a_bar, p_bar, state, mask, None, acc_dtype, dt)
        chosen = resolve(engine, v.device, v.dtype, gaps=dt is not None, slots=inputs.slots)
        if chosen == REFERENCE:
            raise ValueError(
                "the reference can only filter whole sequences. For sequences that are split over "
                "ranks use engine='auto'."
            )
        how = _How(self.group, chosen, inputs.acc_dtype, return_variance)
        y, y_var, mean, variance = _Scan.apply(*inputs[:8], mask, inputs.dt, how)  # type: ignore[no-untyped-call]
        return ScanOutput(y, y_var if return_variance else None, KLAState(mean, variance))


class _How(NamedTuple):
    group: RankGroup
    engine: str
    acc_dtype: torch.dtype | None
    return_variance: bool


class _Scan(torch.autograd.Function):
    """The scan of a piece; see the docstring of this file."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        how: _How = args[-1]
        group, inputs = how.group, _inputs(args[:-1], how)
        first = KLAState(inputs.mean_0, inputs.variance_0)
        own = FilterMap.identity_like(first)
        if group.rank < group.size - 1:  # no rank needs the summary of the last piece
            own = ENGINES[how.engine].load_maps().filter_map(inputs)
        first = to_blocks(first)
        for earlier in _gathered(own, group)[: group.rank]:
            first = earlier.apply(first)
        mean_0, variance_0 = (x.flatten(1, 2) for x in first)
        inputs = inputs._replace(mean_0=mean_0, variance_0=variance_0)
        save = any(ctx.needs_input_grad)
        *found, checkpoints = scan_op(*inputs, how.return_variance, save, how.engine)
        ctx.save_for_backward(*inputs[:9], inputs.dt, checkpoints)
        ctx.how = how
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, checkpoints = ctx.saved_tensors
        how: _How = ctx.how
        group, inputs = how.group, _inputs(tensors, how)
        dy, dy_var, *last = grads
        dy_var = dy_var if how.return_variance else None
        belief = KLAState(inputs.mean_0, inputs.variance_0)
        pairs = zip(last, belief, strict=True)
        dmu, ds = (torch.zeros_like(x) if g is None else g for g, x in pairs)
        own = AdjointMap.identity_like(belief)
        if group.rank > 0:  # nothing comes before the first piece
            maps = ENGINES[how.engine].load_maps()
            own = maps.adjoint_map(inputs, checkpoints, dy, dy_var)
            # Gradients of the belief after this piece reach earlier pieces as well.
            after = AdjointMap(*(_blocks(x, len(ds[0])) for x in own)).apply(
                *to_blocks(KLAState(dmu, ds))
            )
            dmu_0, ds_0 = (x.flatten(1, 2) for x in after)
            own = own._replace(dmu_0=dmu_0, ds_0=ds_0)
        later: tuple[Tensor, Tensor] = to_blocks(KLAState(*map(torch.zeros_like, (dmu, ds))))
        for piece in reversed(_gathered(own, group)[group.rank + 1 :]):
            later = piece.apply(*later)
        ends = tuple(x + y.flatten(1, 2) for x, y in zip((dmu, ds), later, strict=True))
        *found, ddt = scan_backward(*inputs, checkpoints, dy, dy_var, *ends, how.engine)
        if group.rank > 0:  # zeros, not None: DDP waits for a gradient of every parameter
            found = [*found[:6], *map(torch.zeros_like, found[6:])]
        wanted = zip((*found, None, ddt, None), ctx.needs_input_grad, strict=True)
        return tuple(grad if needed else None for grad, needed in wanted)


def _gathered(own: Map, group: RankGroup) -> list[Map]:
    """The maps of all pieces, entries ``[R, G, m, D]``, or ``[R, G, 1, D]`` if shared."""
    sizes = [x.shape[1] for x in own]
    parts = [torch.split(maps, sizes, 1) for maps in group.gather(torch.cat([*own], 1))]
    return [type(own)(*(_blocks(x, min(sizes)) for x in part)) for part in parts]


def _blocks(x: Tensor, G: int) -> Tensor:
    """Entries ``[R, N, D]``, or ``[R, G, D]``, with an axis for the slots of a block."""
    return torch.unflatten(x, 1, (G, -1))


def _turned_by(Q: Tensor, k: Keys) -> Keys:
    """Q^T k for keys ``[B, T, N]`` of a piece and one frame per row and block."""
    blocks = torch.unflatten(k, -1, Q.shape[1:3])
    with own_types(k):
        return into_frame(Q.to(k.dtype).unsqueeze(1), blocks).flatten(2)


def _inputs(tensors: Sequence[Any], how: _How) -> ScanInputs:
    """The arguments of a scan without packed documents."""
    *given, dt = tensors
    return ScanInputs._make((*given, None, how.acc_dtype, dt))


def _tail(x: Tensor, mask: Mask | None, W: int) -> tuple[Tensor, Tensor]:
    """The last W real tokens of every row, right-aligned in ``[B, W, D]``, and their mask."""
    B, T, D = x.shape
    if mask is None:
        n = min(T, W)
        held = (torch.arange(W, device=x.device) >= W - n).view(1, W, 1).expand(B, W, 1)
        return torch.cat([x.new_zeros(B, W - n, D), x[:, T - n :]], 1), held
    from_end = mask.flip(1).cumsum(1).flip(1)  # 1 for the last real token
    slot = torch.where(mask & (from_end <= W), W - from_end, W).unsqueeze(-1)  # W: not kept
    held = torch.zeros(B, W + 1, 1, dtype=torch.bool, device=x.device).scatter(1, slot, True)
    tail = x.new_zeros(B, W + 1, D).scatter(1, slot.expand_as(x), x)
    return tail[:, :W], held[:, :W]


def _refuse_packing(cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is not None:
        raise ValueError(
            "cu_seqlens packs documents into one row, which cannot be split over ranks yet. Pass "
            "rows [B, T] without cu_seqlens, or use context=1."
        )


@contextmanager
def split_sequences(model: nn.Module, group: RankGroup) -> Iterator[None]:
    """A context in which every call of the model is given a piece of the sequences.

    Args:
        model: a model whose mixers are all KLA; its other parts must work token by token.
        group: the ranks that share sequences.
    """
    layers = _layers(model)
    try:
        for layer in layers:
            layer.context = RankContext(group)
        yield
    finally:
        for layer in layers:
            layer.context = None


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """A context in which calls are given whole sequences again, inside ``split_sequences``."""
    layers = [module for module in model.modules() if isinstance(module, KLA)]
    before = [layer.context for layer in layers]
    try:
        for layer in layers:
            layer.context = None
        yield
    finally:
        for layer, context in zip(layers, before, strict=True):
            layer.context = context


def _layers(model: nn.Module) -> list[KLA]:
    kinds = {m.kind for m in model.modules() if isinstance(m, Block)} - {"kla"}
    if kinds:
        raise ValueError(
            f"sequences cannot be split over ranks for {' and '.join(sorted(kinds))}: only KLA has "
            "summaries to exchange. Use context=1, or a plan of kla alone."
        )
    return [module for module in model.modules() if isinstance(module, KLA)]
