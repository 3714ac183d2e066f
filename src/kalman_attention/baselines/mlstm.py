"""The mLSTM block of xLSTM (Beck et al., arXiv:2405.04517): exponential gates on a matrix memory.

Per head, with an input gate i_t = exp(log_i_t) and a forget gate f_t = sigmoid(logit)::

    S_t = f_t S_{t-1} + i_t k_t v_t^T        [K, V]
    n_t = f_t n_{t-1} + i_t k_t              [K]
    y_t = S_t^T q_t / max(|n_t . q_t|, 1)

S and n grow like the largest exp(log_i), so S exp(-m) and n exp(-m) are stored instead, with the
stabiliser m_t = max(log f_t + m_{t-1}, log_i_t). n is the memory of a value that is always 1 and is
stored as one more column of S.

Around it: a stream and a gate from the input; a short convolution and SiLU before q and k; gates
from q, k and v; a layer norm per head; a skip from the convolved stream; SiLU of the gate; the
output projection.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._typing import Mask
from kalman_attention.baselines.common import (
    MatrixMixer,
    carry,
    chunk_size,
    form_for,
    from_chunks,
    segment_sums,
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
from kalman_attention.nn.mixer import Skip, from_table, kept, kept_rows
from kalman_attention.nn.short_conv import ShortConv
from kalman_attention.ops.matrix_scan import matrix_scan

EPS = 1e-6
"""Added to the stabilised denominator, as published: a query of 0 reads 0."""


@dataclass(frozen=True, kw_only=True)
class MLSTMConfig:
    """Options of the mLSTM; the defaults are the published ones.

    Attributes:
        d_model: width of input and output.
        num_heads: number of heads.
        proj_factor: width of stream and gate, in units of d_model.
        qk_factor: width of queries and keys, in units of the stream's; 1 in the published block.
        qkv_block: block size of the block-diagonal projections to q, k and v; None for full
            projections.
        conv_kernel: taps of the convolution before q and k.
        norm_eps: epsilon of the norm per head.
    """

    d_model: int
    num_heads: int = 4
    proj_factor: float = 2.0
    qk_factor: float = 1.0
    qkv_block: int | None = 4
    conv_kernel: int = 4
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        inner, keys = self.proj_factor * self.d_model, self.keys
        block = self.width if self.qkv_block is None else self.qkv_block
        if self.num_heads < 1 or inner != self.width or self.width % self.num_heads:
            raise ValueError(
                f"a stream of proj_factor * d_model = {inner} channels does not split into "
                f"{self.num_heads} heads. Choose another num_heads or proj_factor."
            )
        if keys < 1 or keys != self.qk_factor * inner or keys % self.num_heads:
            raise ValueError(
                f"qk_factor = {self.qk_factor} of {self.width} channels does not split into "
                f"{self.num_heads} heads of whole channels. Choose another qk_factor."
            )
        if block < 1 or self.width % block or keys % (self.width // block):
            raise ValueError(
                f"qkv_block = {self.qkv_block} does not divide a stream of {self.width} channels, "
                f"or {keys} key channels do not split evenly over its blocks. Choose another, or "
                "None."
            )

    @property
    def width(self) -> int:
        """Channels of the stream, which are those of all values together."""
        return round(self.proj_factor * self.d_model)

    @property
    def keys(self) -> int:
        """Channels of all keys together."""
        return round(self.qk_factor * self.width)

    @property
    def state_size(self) -> int:
        """Numbers in the recurrent matrices of one layer, excluding normalisers and window."""
        return self.keys * self.width // self.num_heads


class MLSTMState(NamedTuple):
    """The recurrent state of the layer.

    Attributes:
        conv: the last inputs of the convolution, ``[R, conv_kernel - 1, width]``.
        matrix: S exp(-m) of every head, with n exp(-m) as its last column, ``[R, H, K, V + 1]``, at
            least float32.
        stabiliser: m, ``[R, H]``; only the scale of the stored matrix, so it has no gradient.
    """

    conv: Tensor
    matrix: Tensor
    stabiliser: Tensor


class SmallLinear(nn.Linear):
    """A linear map without bias whose initial weights are normal.

    Args:
        inputs: input channels.
        outputs: output channels.
        std: standard deviation of the initial weights.
    """

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Normal weights."""
        if self.weight.is_meta:
            return  # nothing to initialise, and torch would import its compiler for it
        nn.init.normal_(self.weight, std=self.std)


class Gates(Float32Linear):
    """Logits of input and forget gates, initially determined by their biases alone.

    Forget biases are spaced evenly in [3, 6], input biases are near 0 (normal, 0.1), as in the
    xlstm package; the larger models of its authors initialise the latter to -10.
    """

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The published initialisation."""
        if self.weight.is_meta:
            return  # nothing to initialise, and torch would import its compiler for it
        nn.init.zeros_(self.weight)
        log_i, forget = self.bias.chunk(2)
        nn.init.normal_(log_i, std=0.1)
        forget.copy_(torch.linspace(3.0, 6.0, len(forget)))


class BlockDiagonal(nn.Module):
    """A block-diagonal linear map: every output depends on one block of the input.

    Args:
        inputs: input channels.
        outputs: output channels.
        block: input channels per block.
        std: standard deviation of the initial weights.
    """

    def __init__(self, inputs: int, outputs: int, block: int, std: float) -> None:
        super().__init__()
        self.std = std
        blocks = inputs // block
        self.weight = nn.Parameter(torch.empty(blocks, outputs // blocks, block))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights."""
        if self.weight.is_meta:
            return  # nothing to initialise, and torch would import its compiler for it
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., inputs]`` to ``[..., outputs]``."""
        blocks, _, size = self.weight.shape
        parts = x.reshape(*x.shape[:-1], blocks, size)
        return torch.einsum("...bi,boi->...bo", parts, self.weight).flatten(-2)


class HeadNorm(nn.Module):
    """Layer norm over each head, with a gain per channel and no bias.

    Args:
        width: channels of all heads together.
        eps: added to the variance.
    """

    parameter_group: ClassVar[str] = "vector"

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        """Set the gain to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[B, T, H, V]`` and join the heads, ``[B, T, width]``."""
        normal = nn.functional.layer_norm(x, x.shape[-1:], eps=self.eps).flatten(2)
        return normal * self.weight.to(x.dtype)


class MLSTM(MatrixMixer):
    """The mLSTM block, with the interface of ``nn.KLA``.

    Args:
        config: options.
        **fields: the same options by name, as in ``MLSTM(d_model=64)``.
    """

    options: ClassVar[type[Any]] = MLSTMConfig
    config: MLSTMConfig

    def __init__(self, config: MLSTMConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        config = self.config
        width, keys = config.width, config.keys
        block, std = config.qkv_block or width, math.sqrt(2.0 / (5.0 * config.d_model))
        self.skip = Skip(width)
        self.in_proj = SmallLinear(config.d_model, 2 * width, std)
        self.conv = ShortConv(width, config.conv_kernel)
        self.q_proj = BlockDiagonal(width, keys, block, std)
        self.k_proj = BlockDiagonal(width, keys, block, std)
        self.v_proj = BlockDiagonal(width, width, block, std)
        self.gates = Gates(2 * keys + width, 2 * config.num_heads)
        self.norm = HeadNorm(width, config.norm_eps)
        self.out_proj = nn.Linear(width, config.d_model, bias=False)

    def init_state(
        self, batch_size: int, *, capacity: int = 0, like: Tensor | None = None
    ) -> MLSTMState:
        """Zeros; the size does not depend on ``capacity``."""
        c, like = self.config, self._like(like)
        shape = (batch_size, c.num_heads, c.keys // c.num_heads, c.width // c.num_heads + 1)
        dtype = at_least_float32(like.dtype)
        matrix, stabiliser = (like.new_zeros(s, dtype=dtype) for s in (shape, shape[:2]))
        return MLSTMState(self.conv.init_window(batch_size, like), matrix, stabiliser)

    def _mix(
        self,
        x: Tensor,
        state: MLSTMState,
        mask: Mask | None,
        *,
        parallel: bool,
        ids: Tensor | None = None,
        keep: Mask | None = None,
    ) -> tuple[Tensor, MLSTMState]:
        c = self.config
        found = self.conv.along(project(self.in_proj, x), ids, state.conv, mask)
        u, (stream, gate) = nn.functional.silu(found.u), found.x.chunk(2, -1)
        qkv = torch.cat([self.q_proj(u), self.k_proj(u), self.v_proj(stream)], -1)
        log_i, forget = self.gates(qkv).chunk(2, -1)
        log_f = nn.functional.logsigmoid(forget)
        qkv, log_i, log_f = (from_table(z, found.ids) for z in (qkv, log_i, log_f))
        if mask is not None:
            blank = ~mask.unsqueeze(-1)
            log_i, log_f = log_i.masked_fill(blank, -torch.inf), log_f.masked_fill(blank, 0.0)
        q, k, v = split_heads(qkv, [c.keys, c.keys, c.width], c.num_heads)
        whole = form_for("mlstm", k, v, native=mlstm_native, chunked=mlstm_chunked)
        rule = whole if parallel else mlstm_recurrence
        k = k / math.sqrt(k.shape[-1])
        y, matrix, m = rule(q, k, v, log_i, log_f, state.matrix, state.stabiliser)
        u, gate = (kept_rows(z, found.ids, keep) for z in (u, gate))
        y = self.skip(self.norm(kept(y, keep)).to(x.dtype), u)
        y = project(self.out_proj, y * nn.functional.silu(gate))
        return y, MLSTMState(found.window, matrix, m)


@without_autocast
def mlstm_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_i: Tensor, log_f: Tensor, state: Tensor, m: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, stabilised: a loop over tokens.

    Args:
        q: queries, ``[B, T, H, K]``.
        k: keys, of the same shape.
        v: values, ``[B, T, H, V]``.
        log_i: logarithm of the input gates, ``[B, T, H]``; -inf writes nothing.
        log_f: logarithm of the forget gates, at most 0, of the same shape.
        state: S and n, both times exp(-m), ``[B, H, K, V + 1]``.
        m: stabiliser of the state, finite, ``[B, H]``.

    Returns:
        Outputs ``[B, T, H, V]``, the final state and its stabiliser, at least float32.
    """
    q, k, v, log_i, log_f, state, m = widened(q, k, v, log_i, log_f, state, m)
    m = m.detach()
    y = []
    for t in range(q.shape[1]):
        m_prev, m = m, torch.maximum(log_f[:, t] + m, log_i[:, t]).detach()
        keep, write = (log_f[:, t] + m_prev - m).exp(), (log_i[:, t] - m).exp()
        key = write.unsqueeze(-1) * k[:, t]
        state = keep[..., None, None] * state + key.unsqueeze(-1) * _with_one(v[:, t]).unsqueeze(-2)
        y.append(_read((q[:, t].unsqueeze(-2) @ state).squeeze(-2), m))
    return torch.stack(y, 1) if y else torch.zeros_like(v), state, m


@without_autocast
def mlstm_native(
    q: Tensor, k: Tensor, v: Tensor, log_i: Tensor, log_f: Tensor, state: Tensor, m: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in the native library; as ``mlstm_recurrence``, with finite ``log_f``."""
    q, k, v, log_i, log_f, state, m = widened(q, k, v, log_i, log_f, state, m)
    m_all = _token_stabilisers(log_i, log_f, m)
    m_prev, m_tokens = m_all[:, :-1], m_all[:, 1:]
    keep, write = (log_f + (m_prev - m_tokens)).exp(), (log_i - m_tokens).exp()
    found, state = matrix_scan(q, k, _with_one(v), keep.unsqueeze(-1), state, write)
    return _read(found, m_tokens), state, m_all[:, -1]


@torch.no_grad()
def _token_stabilisers(log_i: Tensor, log_f: Tensor, m: Tensor) -> Tensor:
    """The stabiliser before the first token and after each, ``[B, T + 1, H]``.

    With F_t = log f_1 + ... + log f_t, m_t - F_t is the largest of m_0 and all log_i_s - F_s so
    far.
    """
    # In float64: over a long sequence F is large, and the differences are not.
    total = log_f.double().cumsum(1)
    largest = torch.maximum((log_i - total).cummax(1).values, m.double().unsqueeze(1))
    return torch.cat([m.unsqueeze(1), (total + largest).to(m.dtype)], 1)


@without_autocast
def mlstm_chunked(
    q: Tensor, k: Tensor, v: Tensor, log_i: Tensor, log_f: Tensor, state: Tensor, m: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in matrix products over chunks; arguments and result as for ``mlstm_recurrence``.

    Outputs do not depend on the stabilisers, so no gradient passes through them.
    """
    T = q.shape[1]
    size = chunk_size(T, k.shape[-1], v.shape[-1])
    q, k, v, log_i, log_f, state, m = widened(q, k, v, log_i, log_f, state, m)
    q, k, v, log_f = (to_chunks(x, size) for x in (q, k, _with_one(v), log_f))
    # From token j, or from the start of the chunk, to token i.
    log_weight = segment_sums(log_f) + to_chunks(log_i, size, fill=-torch.inf).unsqueeze(-2)
    log_start = log_f.cumsum(-1)
    # The largest exponent of each token becomes 0, so that no exponential overflows.
    with torch.no_grad():
        largest = log_weight.amax(-1)
        m_before, m = _stabilisers(log_start[..., -1], largest[..., -1], m)
        m_tokens = torch.maximum(log_start + m_before, largest)
    weight = (log_weight - m_tokens.unsqueeze(-1)).exp()
    start = (log_start + m_before - m_tokens).exp().unsqueeze(-1)
    update = (k * weight[..., -1, :].unsqueeze(-1)).mT @ v
    before, state = carry(start[..., -1:, :], update, state)
    y = _read((q @ k.mT * weight) @ v + (q * start) @ before, m_tokens)
    return from_chunks(y, T), state, m


def _stabilisers(decay: Tensor, largest: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """The stabiliser before each chunk ``[B, H, n, 1]``, and the last; inputs ``[B, H, n]``."""
    before = []
    for log_f, log_i in zip(decay.unbind(-1), largest.unbind(-1), strict=True):
        before.append(m)
        m = torch.maximum(log_f + m, log_i)
    return torch.stack(before, -1).unsqueeze(-1), m


def _with_one(v: Tensor) -> Tensor:
    return nn.functional.pad(v, (0, 1), value=1.0)


def _read(found: Tensor, m: Tensor) -> Tensor:
    """Divide a read-out ``[..., V + 1]`` by its last channel, or by 1 if that is larger."""
    y, normaliser = torch.split(found, [found.shape[-1] - 1, 1], -1)
    # The state is scaled by exp(-m), and so is the 1. Divided once per token, not once per channel:
    # the gradient of a quotient is four passes over all channels.
    return y * (torch.maximum(normaliser.abs(), (-m).exp().unsqueeze(-1)) + EPS).reciprocal()
