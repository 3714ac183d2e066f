"""Any call as plain rows: packed documents become padded rows, padding becomes empty evidence.

The torch engines work on ``[R, C, CHUNK, ...]`` blocks: R rows of C chunks. This file brings the
tensors of a call into that shape and back. A position without a token has neither evidence nor a
query and is False in ``real``; all that an engine has to do there is to skip the predict step.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention.filtering.blocks import to_blocks
from kalman_attention.filtering.evidence import without_gaps
from kalman_attention.filtering.gaps import transition
from kalman_attention.filtering.moment import KLAState
from kalman_attention.ops.contract import CHUNK, ScanInputs


class Rows(NamedTuple):
    """A call as rows: tokens ``[R, C, CHUNK, ...]``, all in the arithmetic dtype.

    Slots form G blocks of m that share a precision (``filtering/blocks.py``).

    Attributes:
        q: queries, ``[..., G, m]``; 0 at padding, like k, v, lam_v.
        k: keys.
        v: values.
        lam_v: value precisions.
        a_bar: decay, ``[G, 1, D]``.
        p_bar: process-noise variance, ``[G, 1, D]``.
        state_0: initial belief, ``[R, G, m, D]`` and ``[R, G, 1, D]``.
        real: True at real tokens, ``[R, C, CHUNK, 1, 1, 1]``; broadcasts against beliefs.
        layout: maps rows back to the tensors of the call.
        dt: time before every token, ``[R, C, CHUNK, D]`` or ``[R, C, CHUNK, 1]``; None means 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lam_v: Tensor
    a_bar: Tensor
    p_bar: Tensor
    state_0: KLAState
    real: Tensor
    layout: "Layout"
    dt: Tensor | None

    def dynamics(self, t: int) -> tuple[Tensor, Tensor]:
        """Decay and noise variance of the step to token t of every chunk."""
        if self.dt is None:
            return self.a_bar, self.p_bar
        return transition(self.a_bar, self.p_bar, self.dt[:, :, t].unsqueeze(-2))


class Layout(NamedTuple):
    """The positions of the tokens of a call among the rows.

    Attributes:
        positions: index of the token (row-major over ``[B, T]``) at each place of each row, -1 for
            none, ``[R, C * CHUNK]``.
        slots: number of every row's first saved belief, ``[R]``.
        chunks: number of saved beliefs in the call.
        blocks: number of blocks of slots that share a precision, G.
    """

    positions: Tensor
    slots: Tensor
    chunks: int
    blocks: int

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Tokens ``[B, T, F]`` to rows ``[R, C, CHUNK, F]``, with 0 at padding."""
        R, F = self.positions.shape[0], x.shape[-1]
        if x.shape[0] * x.shape[1] == 0:
            return x.new_zeros((R, 0, CHUNK, F), dtype=dtype)
        picked = x.reshape(-1, F).to(dtype)[self.positions.clamp(min=0)]
        picked = picked.masked_fill((self.positions < 0).unsqueeze(-1), 0.0)
        return picked.view(R, self.positions.shape[1] // CHUNK, CHUNK, F)

    def scatter(self, rows: Tensor, like: Tensor) -> Tensor:
        """Rows ``[R, C, CHUNK, F]`` to tokens, in the shape and dtype of ``like``."""
        (B, T), F = like.shape[:2], rows.shape[-1]
        out = rows.new_zeros(B * T, F)
        held = self.positions >= 0
        out[self.positions[held]] = rows.flatten(1, 2)[held]
        return out.view(B, T, F).to(like.dtype)

    def save(self, starts: KLAState, dtype: torch.dtype) -> Tensor:
        """Beliefs before each chunk in the layout of the contract; shared variances repeated."""
        C, N, D = starts.mean.shape[1], starts.mean.shape[2:4].numel(), starts.mean.shape[-1]
        saved = starts.mean.new_zeros(2, self.chunks, N, D, dtype=dtype)
        numbers, used = self._numbers(C)
        for half, start in zip(saved, starts, strict=True):
            whole = start.expand_as(starts.mean).flatten(2, 3)
            half[numbers[used]] = whole[used].to(dtype)
        return saved

    def load(self, checkpoints: Tensor, dtype: torch.dtype) -> KLAState:
        """The inverse of ``save``."""
        # A chunk without tokens gets the belief of some other chunk, which is never used.
        numbers, _ = self._numbers(self.positions.shape[1] // CHUNK)
        found = checkpoints[:, numbers.clamp(max=max(self.chunks - 1, 0))].to(dtype)
        mean, variance = torch.unflatten(found, -2, (self.blocks, -1))
        return KLAState(mean, variance[..., :1, :])

    def _numbers(self, C: int) -> tuple[Tensor, Tensor]:
        numbers = self.slots.unsqueeze(1) + torch.arange(C, device=self.slots.device)
        used = (self.positions >= 0).view(-1, C, CHUNK).any(-1) if C else numbers.bool()
        return numbers, used


def end_gradients(
    inputs: ScanInputs, dmean: Tensor | None, dvariance: Tensor | None, dtype: torch.dtype
) -> KLAState:
    """Gradients with respect to the final belief, in blocks of slots; None means 0."""
    given = (dmean, dvariance), (inputs.mean_0, inputs.variance_0)
    ends = (torch.zeros_like(x) if g is None else g for g, x in zip(*given, strict=True))
    return to_blocks(KLAState(*(x.to(dtype) for x in ends)))


def to_rows(inputs: ScanInputs) -> Rows:
    """Rearrange a call into rows."""
    layout, real = _layout(inputs)
    dtype = inputs.arithmetic_dtype
    blank = None if inputs.mask is None else ~inputs.mask.unsqueeze(-1)

    def gather(x: Tensor) -> Tensor:
        return layout.gather(x if blank is None else x.masked_fill(blank, 0.0), dtype)

    q, k, v, lam_v = (gather(x) for x in inputs[:4])
    v = without_gaps(v, lam_v)
    a_bar, p_bar, mean_0, variance_0 = (x.to(dtype) for x in inputs[4:8])
    state_0 = to_blocks(KLAState(mean_0, variance_0))
    q, k = (torch.unflatten(x, -1, state_0.mean.shape[1:3]) for x in (q, k))
    a_bar, p_bar = a_bar.unsqueeze(-2), p_bar.unsqueeze(-2)
    dt = None if inputs.dt is None else gather(inputs.dt)
    real = real.view(*v.shape[:3], 1, 1, 1)
    return Rows(q, k, v, lam_v, a_bar, p_bar, state_0, real, layout, dt)


def _layout(inputs: ScanInputs) -> tuple[Layout, Tensor]:
    (B, T), device = inputs.v.shape[:2], inputs.v.device
    if inputs.cu_seqlens is None:
        first = torch.arange(B, device=device) * T
        lengths = torch.full((B,), T, device=device)
        slots = torch.arange(B, device=device) * -(-T // CHUNK)
        longest = T
    else:
        bounds = inputs.cu_seqlens.to(device=device, dtype=torch.int64)
        first, lengths = bounds[:-1], bounds.diff()
        slots = first // CHUNK + torch.arange(len(lengths), device=device)
        longest = int(lengths.max())  # a synchronisation on a device, once per call
    # Rows are padded to whole chunks of the longest.
    offset = torch.arange(-(-longest // CHUNK) * CHUNK, device=device)
    index = torch.where(offset < lengths.unsqueeze(1), first.unsqueeze(1) + offset, -1)
    real = index >= 0
    if inputs.mask is not None and T > 0:
        real = real & inputs.mask.reshape(-1)[index.clamp(min=0)]
    return Layout(index, slots, inputs.chunks, inputs.a_bar.shape[0]), real
