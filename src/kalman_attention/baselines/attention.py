"""Causal softmax attention with a KV cache; rotary positions and QK-norm are optional."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask
from kalman_attention.baselines.common import mix_documents
from kalman_attention.nn.decoding import project
from kalman_attention.nn.mixer import LayerOutput, Mixer
from kalman_attention.nn.norms import rms_norm


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Options of the attention mixer.

    Attributes:
        d_model: width of input and output.
        num_heads: number of heads; None means heads of 64 channels, at least one.
        qk_norm: divide queries and keys by their root mean square.
        rotary_base: longest wavelength of the rotary positions, in tokens over 2 pi; None for no
            positions, in which case order is known only through the causal mask and other mixers.
    """

    d_model: int
    num_heads: int | None = None
    qk_norm: bool = True
    rotary_base: float | None = 10_000.0

    # transformers reads this from every module named Attention; the model's config decides instead.
    _attn_implementation: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.heads < 1 or self.d_model % self.heads:
            raise ValueError(
                f"d_model = {self.d_model} does not split into {self.heads} equal heads. Choose "
                "another num_heads."
            )
        if self.rotary_base is not None and (self.head_dim % 2 or self.rotary_base <= 0.0):
            raise ValueError(
                f"rotary positions need pairs of channels and a positive base, but heads "
                f"have {self.head_dim} channels and rotary_base is {self.rotary_base}. Choose "
                "another num_heads or rotary_base, or rotary_base=None for no positions."
            )

    @property
    def heads(self) -> int:
        """Number of heads."""
        # 64 channels per head are usual, and every fused kernel supports them.
        return max(1, self.d_model // 64) if self.num_heads is None else self.num_heads

    @property
    def head_dim(self) -> int:
        """Channels per head."""
        return self.d_model // self.heads


class AttentionState(NamedTuple):
    """The KV cache.

    Attributes:
        keys: rotated keys, ``[R, H, capacity, head_dim]``; the first ``length`` are filled.
        values: values, in the same shape.
        real: which of the filled entries hold a token, ``[R, length]`` bool; None means all.
        seen: number of tokens so far per row, ``[R]``.
        length: number of filled entries. Below the capacity new tokens are written in place, as in
            a cache made by ``init_state(..., capacity=n)``; otherwise every call copies. For
            compiled decoding it is a scalar tensor on whose value only masks depend: ``real`` is
            then ``[R, capacity]``, and all tokens are written in place.
    """

    keys: Tensor
    values: Tensor
    real: Tensor | None
    seen: Tensor
    length: int | Tensor


class Attend(nn.Module):
    """Softmax attention of queries over keys: a module, so that hooks can see the weights.

    Attributes:
        fused: use torch's fused kernel, which does not return weights.
    """

    fused: bool = True

    def forward(
        self, q: Tensor, keys: Tensor, values: Tensor, allowed: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Read the values.

        Args:
            q: queries, ``[B, H, T, head_dim]``.
            keys: ``[B, H, S, head_dim]``.
            values: ``[B, H, S, head_dim]``.
            allowed: which keys a query may attend to, ``[..., T, S]`` bool; None for all.
            causal: instead of ``allowed``, attend to keys up to the query's own position; T = S.

        Returns:
            The result, like ``q``, and the weights ``[B, H, T, S]``, None for the fused kernel.
        """
        if self.fused:
            attention = nn.functional.scaled_dot_product_attention
            return attention(q, keys, values, attn_mask=allowed, is_causal=causal), None
        scores = q @ keys.transpose(2, 3) / math.sqrt(q.shape[-1])
        if causal:
            allowed = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        dtype = torch.promote_types(q.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=dtype).to(q.dtype)
        return weights @ values, weights


class Attention(Mixer):
    """Causal multi-head softmax attention, with the interface of ``nn.KLA``.

    Args:
        config: options.
        **fields: the same options by name, as in ``Attention(d_model=64)``.
    """

    options: ClassVar[type[Any]] = AttentionConfig
    config: AttentionConfig

    def __init__(self, config: AttentionConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        config = self.config
        self.qkv_proj = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.attend = Attend()
        self.out_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def init_state(
        self, batch_size: int, *, capacity: int = 0, like: Tensor | None = None
    ) -> AttentionState:
        """An empty cache, with memory reserved for ``capacity`` tokens."""
        like, c = self._like(like), self.config
        shape = (batch_size, c.heads, capacity, c.head_dim)
        seen = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        return AttentionState(like.new_zeros(shape), like.new_zeros(shape), None, seen, 0)

    def reserve(self, state: AttentionState, capacity: int) -> AttentionState:
        """A copy with memory for more tokens, to be filled in place."""
        room = (0, 0, 0, capacity)
        keys, values = (
            nn.functional.pad(z[:, :, : state.length], room) for z in (state.keys, state.values)
        )
        return state._replace(keys=keys, values=values)

    def mix(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        return_variance: bool = False,
    ) -> LayerOutput:
        """Mix a piece of sequences, continuing from ``state``; see ``Mixer``. No variance."""
        self._check(x, mask, cu_seqlens)
        if cu_seqlens is not None:
            return mix_documents(self.mix, x, state, cu_seqlens)
        B, T, _ = x.shape
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        state = self.init_state(B, like=x) if state is None else state
        qkv = torch.unflatten(project(self.qkv_proj, x), -1, (3, self.config.heads, -1))
        q, k, v = qkv.unbind(2)
        ordinal = torch.arange(T, device=x.device) if mask is None else mask.cumsum(1) - 1
        positions = state.seen.unsqueeze(1) + ordinal  # [B, T]
        q, k = (self._place(z, positions) for z in (q, k))
        old, (k, v) = state, (z.transpose(1, 2) for z in (k, v))
        state, keys, values = (_put if isinstance(old.length, Tensor) else _append)(old, k, v, mask)
        y = self._attend(q.transpose(1, 2), keys, values, state.real, old.length)
        y = project(self.out_proj, y.transpose(1, 2).flatten(2))
        if mask is not None:
            y = y.masked_fill(~mask.unsqueeze(-1), 0.0)
        return LayerOutput(y, None, state)

    def step(
        self,
        x: Tensor,
        state: AttentionState,
        *,
        mask: Mask | None = None,
        return_variance: bool = False,
    ) -> LayerOutput:
        """One token, ``[B, d_model]`` (mask ``[B]``)."""
        self._check(x, mask, axes=2)
        found = self.mix(x.unsqueeze(1), state, None if mask is None else mask.unsqueeze(1))
        return LayerOutput(found.y.squeeze(1), None, found.state)

    def _place(self, x: Tensor, positions: Tensor) -> Tensor:
        """Normalise heads ``[B, T, H, head_dim]`` and rotate them by their positions."""
        if self.config.qk_norm:
            x = rms_norm(x)
        base = self.config.rotary_base
        return x if base is None else rotate(x, positions, base)

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, real: Tensor | None, start: int | Tensor
    ) -> Tensor:
        T, S = q.shape[2], keys.shape[2]
        if T == 0:
            return q
        if real is None and (T == S or T == 1):
            y: Tensor = self.attend(q, keys, values, None, bool(T == S))[0]  # T may be symbolic
            return y
        slot = torch.arange(S, device=q.device)
        place = (torch.arange(T, device=q.device) + start).unsqueeze(1)  # of every query
        allowed = slot <= place  # [T, S]
        if real is not None:
            # A query at padding attends to itself: the softmax of an empty row is NaN.
            allowed = ((allowed & real.unsqueeze(1)) | (slot == place)).unsqueeze(1)
        y = self.attend(q, keys, values, allowed, False)[0]
        return y


def _append(
    state: AttentionState, k: Tensor, v: Tensor, mask: Mask | None
) -> tuple[AttentionState, Tensor, Tensor]:
    """Append keys and values ``[B, H, T, head_dim]``; return the new state and all entries."""
    length, T = state.length, k.shape[2]
    assert not isinstance(length, Tensor)
    end = length + T
    real = state.real
    if mask is not None or real is not None:
        old = mask.new_ones(mask.shape[0], length) if real is None and mask is not None else real
        new = mask if mask is not None else torch.ones_like(k[:, 0, :, 0], dtype=torch.bool)
        real = new if old is None else torch.cat([old, new], 1)
    # In place only without gradients: autograd may still need the old keys.
    if end <= state.keys.shape[2] and not torch.is_grad_enabled():
        keys, values = state.keys, state.values
        keys[:, :, length:end] = k
        values[:, :, length:end] = v
    else:
        keys = torch.cat([state.keys[:, :, :length].to(k.dtype), k], 2) if length else k
        values = torch.cat([state.values[:, :, :length].to(v.dtype), v], 2) if length else v
    seen = state.seen + (T if mask is None else mask.sum(1))
    new_state = AttentionState(keys, values, real, seen, end)
    return new_state, keys[:, :, :end], values[:, :, :end]


def _put(
    state: AttentionState, k: Tensor, v: Tensor, mask: Mask | None
) -> tuple[AttentionState, Tensor, Tensor]:
    """Like ``_append``, but always in place, so that no compiled program depends on the length."""
    (B, _, T, _), device = k.shape, k.device
    real = state.real
    assert real is not None
    if mask is None:
        mask = torch.ones(B, T, dtype=torch.bool, device=device)
    place = torch.arange(T, device=device) + state.length
    state.keys.index_copy_(2, place, k.to(state.keys.dtype))
    state.values.index_copy_(2, place, v.to(state.values.dtype))
    real.index_copy_(1, place, mask)
    new = state._replace(seen=state.seen + mask.sum(1), length=state.length + T)
    return new, state.keys.to(k.dtype), state.values.to(v.dtype)


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary positions: rotate channel pairs of ``[B, T, H, C]`` by angles that grow with position.

    Channel c is paired with channel c + C / 2.
    """
    # Angles are float32 for every dtype of x: bfloat16 cannot count beyond 256.
    half, dtype = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    rate = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (positions.float().unsqueeze(-1) * rate).unsqueeze(2).to(dtype)  # [B, T, 1, C / 2]
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)
