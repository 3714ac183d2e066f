"""Gated linear attention (Yang et al., arXiv:2312.06635): a matrix state that decays by channel.

Per head, with a decay alpha_t of every key channel::

    S_t = diag(alpha_t) S_{t-1} + k_t v_t^T        [K, V]
    y_t = S_t^T q_t

and around it: q, k, v and an output gate from one projection, alpha from a low-rank one, a
root-mean-square norm per head, SiLU of the gate, the output projection.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask
from kalman_attention.baselines.common import (
    HeadSizes,
    MatrixMixer,
    carry,
    chunk_size,
    fla_kernel,
    form_for,
    from_chunks,
    split_heads,
    to_chunks,
)
from kalman_attention.nn.decoding import project
from kalman_attention.nn.float32 import (
    Float32Linear,
    at_least_float32,
    widened,
    without_autocast,
)
from kalman_attention.nn.mixer import from_table, kept, kept_rows
from kalman_attention.nn.norms import RMSNorm
from kalman_attention.ops.matrix_scan import matrix_scan


@dataclass(frozen=True, kw_only=True)
class GLAConfig(HeadSizes):
    """Options of gated linear attention; the defaults are the published ones.

    Attributes:
        gate_low_rank_dim: rank of the projection to the decays.
        gate_logit_normalizer: alpha = sigmoid(logit)^(1 / normalizer); larger means slower
            forgetting.
        norm_eps: epsilon of the output norm.
    """

    gate_low_rank_dim: int = 16
    gate_logit_normalizer: float = 16.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate_low_rank_dim < 1 or self.gate_logit_normalizer <= 0.0:
            raise ValueError(
                "gate_low_rank_dim must be at least 1 and gate_logit_normalizer positive, got "
                f"{self.gate_low_rank_dim} and {self.gate_logit_normalizer}."
            )


class GLAState(NamedTuple):
    """The recurrent state: the matrix of every head, ``[R, H, K, V]``, at least float32."""

    matrix: Tensor


class GLA(MatrixMixer):
    """Gated linear attention, with the interface of ``nn.KLA``.

    Args:
        config: options.
        **fields: the same options by name, as in ``GLA(d_model=64)``.
    """

    options: ClassVar[type[Any]] = GLAConfig
    config: GLAConfig

    def __init__(self, config: GLAConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        config = self.config
        keys, values = config.num_heads * config.key_dim, config.num_heads * config.value_dim
        self._split = [keys, keys, values, values]
        self.in_proj = nn.Linear(config.d_model, sum(self._split), bias=False)
        self.decay_down = nn.Linear(config.d_model, config.gate_low_rank_dim, bias=False)
        self.decay_up = Float32Linear(config.gate_low_rank_dim, keys)
        self.norm = RMSNorm(config.value_dim, config.norm_eps)
        self.out_proj = nn.Linear(values, config.d_model, bias=False)

    def init_state(
        self, batch_size: int, *, capacity: int = 0, like: Tensor | None = None
    ) -> GLAState:
        """Zeros; the size does not depend on ``capacity``."""
        c, like = self.config, self._like(like)
        shape = (batch_size, c.num_heads, c.key_dim, c.value_dim)
        return GLAState(like.new_zeros(shape, dtype=at_least_float32(like.dtype)))

    def _mix(
        self,
        x: Tensor,
        state: GLAState,
        mask: Mask | None,
        *,
        parallel: bool,
        ids: Tensor | None = None,
        keep: Mask | None = None,
    ) -> tuple[Tensor, GLAState]:
        c = self.config
        q, k, v, gate = split_heads(project(self.in_proj, x), self._split, c.num_heads)
        decay = self.decay_up(project(self.decay_down, x))
        (logit,) = split_heads(decay, self._split[:1], c.num_heads)
        log_alpha = nn.functional.logsigmoid(logit) / c.gate_logit_normalizer
        q, k, v, log_alpha = (from_table(z, ids) for z in (q, k, v, log_alpha))
        if mask is not None:
            log_alpha = log_alpha.masked_fill(~mask[:, :, None, None], 0.0)
        whole = form_for("gla", k, v, native=gla_native, chunked=gla_chunked)
        rule = whole if parallel else gla_recurrence
        y, matrix = rule(q / math.sqrt(c.key_dim), k, v, log_alpha, state.matrix)
        gate = kept_rows(gate, ids, keep)
        y = self.norm(kept(y.to(x.dtype), keep)) * nn.functional.silu(gate)
        return project(self.out_proj, y.flatten(2)), GLAState(matrix)


@without_autocast
def gla_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition: a loop over tokens.

    Args:
        q: queries, ``[B, T, H, K]``.
        k: keys, of the same shape; a key of 0 writes nothing.
        v: values, ``[B, T, H, V]``.
        log_alpha: logarithm of the decays, at most 0, ``[B, T, H, K]``.
        state: ``[B, H, K, V]``.

    Returns:
        Outputs ``[B, T, H, V]`` and the final state, at least float32.
    """
    q, k, v, log_alpha, state = widened(q, k, v, log_alpha, state)
    y = []
    for t in range(q.shape[1]):
        state = log_alpha[:, t].exp().unsqueeze(-1) * state
        state = state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        y.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(y, 1) if y else torch.zeros_like(v), state


@without_autocast
def gla_native(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in the native library; arguments and result as for ``gla_recurrence``."""
    q, k, v, log_alpha, state = widened(q, k, v, log_alpha, state)
    return matrix_scan(q, k, v, log_alpha.exp(), state)


@without_autocast
def gla_chunked(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in matrix products over chunks; arguments and result as for ``gla_recurrence``.

    No exponent is positive, and none is a difference of sums, so decays of any strength neither
    overflow nor lose digits.
    """
    T = q.shape[1]
    kernel = fla_kernel("gla", "chunk_gla", k, v)
    if kernel is not None:
        return kernel(q, k, v, log_alpha, state)
    q, k, v, log_alpha, state = widened(q, k, v, log_alpha, state)
    size = chunk_size(T, k.shape[-1], v.shape[-1])
    q, k, v, log_alpha = (to_chunks(x, size) for x in (q, k, v, log_alpha))
    inside = _decayed_scores(q, k, log_alpha)
    update = (k * inside.to_end.exp()).mT @ v
    before, state = carry(inside.total.exp().unsqueeze(-1), update, state)
    y = inside.scores @ v + (q * inside.from_start.exp()) @ before
    return from_chunks(y, T), state


class _Scores(NamedTuple):
    """Attention inside a chunk, ``[..., L, L]``, and the log decays to its two ends."""

    scores: Tensor
    from_start: Tensor  # [..., L, K]: from the start of the chunk to each token
    to_end: Tensor  # [..., L, K]: from each token to the end of the chunk
    total: Tensor  # [..., K]: over the whole chunk


def _decayed_scores(q: Tensor, k: Tensor, log_alpha: Tensor) -> _Scores:
    """q_i^T diag(alpha_{j+1} ... alpha_i) k_j for j <= i, by recursive halving.

    The decay from a key in the first half to a query in the second is the product of two: from the
    key to the middle, and from the middle to the query.
    """
    L = q.shape[-2]
    if L == 1:  # [..., 1, K]: a token and itself, without decay
        score = (q * k).sum(-1, keepdim=True)
        return _Scores(score, log_alpha, torch.zeros_like(log_alpha), log_alpha.squeeze(-2))
    q, k, log_alpha = (x.reshape(*x.shape[:-2], 2, L // 2, -1) for x in (q, k, log_alpha))
    inside = _decayed_scores(q, k, log_alpha)
    # Both halves are done, [..., 2, L / 2, ...]; what remains is late queries with early keys.
    (early, late), (first, second) = inside.scores.unbind(-3), inside.total.unbind(-2)
    early_start, late_start = inside.from_start.unbind(-3)
    early_end, late_end = inside.to_end.unbind(-3)
    cross = (q.select(-3, 1) * late_start.exp()) @ (k.select(-3, 0) * early_end.exp()).mT
    rows = torch.cat([early, torch.zeros_like(cross)], -1), torch.cat([cross, late], -1)
    return _Scores(
        torch.cat(rows, -2),
        torch.cat([early_start, late_start + first.unsqueeze(-2)], -2),
        torch.cat([early_end + second.unsqueeze(-2), late_end], -2),
        first + second,
    )
