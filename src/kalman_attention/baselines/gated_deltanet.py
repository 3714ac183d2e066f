"""Gated DeltaNet (Yang et al., arXiv:2412.06464): a decaying memory that corrects itself.

Per head, with a decay alpha_t and a rate beta_t, both in (0, 1), and keys of length 1 (beta_t in
(0, 2) with ``negative_eigenvalues``)::

    S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        [K, V]
    y_t = S_t^T q_t

and around it: q, k, v through a short convolution and SiLU, a root-mean-square norm per head,
SiLU of an output gate, the output projection.
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
    segment_sums,
    split_heads,
    to_chunks,
)
from kalman_attention.nn.decoding import project
from kalman_attention.nn.float32 import (
    KeepsFloat32,
    at_least_float32,
    empty_parameter,
    widened,
    without_autocast,
)
from kalman_attention.nn.links import inverse_softplus, log_uniform
from kalman_attention.nn.mixer import from_table, kept, kept_rows
from kalman_attention.nn.norms import RMSNorm, l2_norm
from kalman_attention.nn.short_conv import ShortConv
from kalman_attention.ops.matrix_scan import matrix_scan


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(HeadSizes):
    """Options of Gated DeltaNet; the defaults are the published ones.

    Attributes:
        expand_k: width of all keys together, in units of d_model.
        expand_v: width of all values together, in units of d_model.
        conv_kernel: taps of the convolution of q, k and v.
        negative_eigenvalues: let beta range from 0 to 2 instead of 1 (Grazzi et al.,
            arXiv:2411.12537). Beyond 1 a token reflects the memory along its key instead of erasing
            it, and products of reflections track states that decays cannot.
        norm_eps: epsilon of the output norm.
    """

    expand_k: float = 0.75
    expand_v: float = 1.5
    conv_kernel: int = 4
    negative_eigenvalues: bool = False
    norm_eps: float = 1e-5


class GatedDeltaNetState(NamedTuple):
    """The recurrent state of the layer.

    Attributes:
        conv: the last inputs of the convolution, ``[R, conv_kernel - 1, channels]``.
        matrix: the memory of every head, ``[R, H, K, V]``, at least float32.
    """

    conv: Tensor
    matrix: Tensor


class DeltaDecay(KeepsFloat32):
    """log alpha = -exp(A_log) softplus(x + dt_bias), one rate and one step size per head.

    Args:
        heads: number of heads.
    """

    parameter_group: ClassVar[str] = "state_space"

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log = empty_parameter(heads)
        self.dt_bias = empty_parameter(heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As published: rates uniform in (0, 16], step sizes log-uniform in [0.001, 0.1]."""
        if self.A_log.is_meta:
            return  # nothing to initialise, and torch would import its compiler for it
        shape, dtype = tuple(self.A_log.shape), self.A_log.dtype
        self.A_log.copy_(torch.log(16.0 * (1.0 - torch.rand(shape, dtype=dtype))))
        self.dt_bias.copy_(inverse_softplus(log_uniform(shape, 1e-3, 1e-1, dtype)))

    def forward(self, x: Tensor) -> Tensor:
        """Log decays of tokens ``[B, T, H]``, at least float32."""
        dt = nn.functional.softplus(x.to(self.dt_bias.dtype) + self.dt_bias)
        return -self.A_log.exp() * dt


class GatedDeltaNet(MatrixMixer):
    """Gated DeltaNet, with the interface of ``nn.KLA``.

    Args:
        config: options.
        **fields: the same options by name, as in ``GatedDeltaNet(d_model=64)``.
    """

    options: ClassVar[type[Any]] = GatedDeltaNetConfig
    config: GatedDeltaNetConfig

    def __init__(self, config: GatedDeltaNetConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        config = self.config
        H = config.num_heads
        keys, values = H * config.key_dim, H * config.value_dim
        self._heads = [keys, keys, values]
        self._split = [sum(self._heads), values, H, H]
        self.in_proj = nn.Linear(config.d_model, sum(self._split), bias=False)
        self.conv = ShortConv(sum(self._heads), config.conv_kernel, bias=False)
        self.decay = DeltaDecay(H)
        self.norm = RMSNorm(config.value_dim, config.norm_eps)
        self.out_proj = nn.Linear(values, config.d_model, bias=False)

    def init_state(
        self, batch_size: int, *, capacity: int = 0, like: Tensor | None = None
    ) -> GatedDeltaNetState:
        """Zeros; the size does not depend on ``capacity``."""
        c, like = self.config, self._like(like)
        shape = (batch_size, c.num_heads, c.key_dim, c.value_dim)
        matrix = like.new_zeros(shape, dtype=at_least_float32(like.dtype))
        return GatedDeltaNetState(self.conv.init_window(batch_size, like), matrix)

    def _mix(
        self,
        x: Tensor,
        state: GatedDeltaNetState,
        mask: Mask | None,
        *,
        parallel: bool,
        ids: Tensor | None = None,
        keep: Mask | None = None,
    ) -> tuple[Tensor, GatedDeltaNetState]:
        c = self.config
        found = self.conv.along(project(self.in_proj, x), ids, state.conv, mask)
        _, gate, rate, step = torch.split(found.x, self._split, -1)
        q, k, v = split_heads(nn.functional.silu(found.u), self._heads, c.num_heads)
        # As published, 1e-6 is added to the squared length.
        q, k = l2_norm(q, eps=1e-3), l2_norm(k, eps=1e-3)
        log_alpha = self.decay(step)
        beta = rate.to(log_alpha.dtype).sigmoid()
        if c.negative_eigenvalues:
            beta = 2.0 * beta
        q, k, v, log_alpha, beta = (from_table(z, found.ids) for z in (q, k, v, log_alpha, beta))
        if mask is not None:
            blank = ~mask.unsqueeze(-1)
            log_alpha, beta = log_alpha.masked_fill(blank, 0.0), beta.masked_fill(blank, 0.0)
        whole = form_for("delta", k, v, native=delta_native, chunked=delta_chunked)
        rule = whole if parallel else delta_recurrence
        y, matrix = rule(q / math.sqrt(c.key_dim), k, v, log_alpha, beta, state.matrix)
        y, gate = kept(y.to(x.dtype), keep), kept_rows(gate, found.ids, keep)
        y = self.norm(y).flatten(2) * nn.functional.silu(gate)
        return project(self.out_proj, y), GatedDeltaNetState(found.window, matrix)


@without_autocast
def delta_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition: a loop over tokens.

    Args:
        q: queries, ``[B, T, H, K]``.
        k: keys of the same shape, of length at most 1.
        v: values, ``[B, T, H, V]``.
        log_alpha: logarithm of the decays, at most 0, ``[B, T, H]``.
        beta: rates between 0 and 2, ``[B, T, H]``; 0 writes nothing.
        state: ``[B, H, K, V]``.

    Returns:
        Outputs ``[B, T, H, V]`` and the final state, at least float32.
    """
    q, k, v, log_alpha, beta, state = widened(q, k, v, log_alpha, beta, state)
    y = []
    for t in range(q.shape[1]):
        state = log_alpha[:, t, :, None, None].exp() * state
        recalled = (k[:, t].unsqueeze(-2) @ state).squeeze(-2)
        correction = beta[:, t].unsqueeze(-1) * (v[:, t] - recalled)
        state = state + k[:, t].unsqueeze(-1) * correction.unsqueeze(-2)
        y.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(y, 1) if y else torch.zeros_like(v), state


@without_autocast
def delta_native(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in the native library; arguments and result as for ``delta_recurrence``."""
    q, k, v, log_alpha, beta, state = widened(q, k, v, log_alpha, beta, state)
    return matrix_scan(q, k, v, log_alpha.exp().unsqueeze(-1), state, beta, delta=True)


@without_autocast
def delta_chunked(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in matrix products over chunks; arguments and result as for ``delta_recurrence``.

    Inside a chunk the corrections u of all tokens solve one triangular system: with D_ij the decay
    from token j to token i and d_i that from the start of the chunk,

        u_i + beta_i sum_{j < i} D_ij (k_i . k_j) u_j = beta_i (v_i - d_i S^T k_i),

    which is linear in the state S before the chunk: u = u_v - u_k S.
    """
    T = q.shape[1]
    kernel = fla_kernel("gated_delta_rule", "chunk_gated_delta_rule", k, v)
    if kernel is not None:
        return kernel(q, k, v, log_alpha, beta, state)
    size = chunk_size(T, k.shape[-1], v.shape[-1])
    q, k, v, log_alpha, beta, state = widened(q, k, v, log_alpha, beta, state)
    q, k, v, log_alpha, beta = (to_chunks(x, size) for x in (q, k, v, log_alpha, beta))
    decay = segment_sums(log_alpha).exp()
    # d_i above, and the decay from every token to the end of its chunk.
    from_start, to_end = log_alpha.cumsum(-1).exp().unsqueeze(-1), decay[..., -1, :].unsqueeze(-1)
    weighted = k * beta.unsqueeze(-1)
    # The unit diagonal is implied, so the entries of ``system`` on it are not read.
    system = (weighted @ k.mT) * decay
    right = torch.cat([v * beta.unsqueeze(-1), weighted * from_start], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u_v, u_k = solved.split([v.shape[-1], k.shape[-1]], -1)
    # State after a chunk: (kept - K^T u_k) S + K^T u_v, with keys decayed to the end of the chunk.
    keys_at_end = (k * to_end).mT
    kept = from_start[..., -1:, :] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    before, state = carry(kept - keys_at_end @ u_k, keys_at_end @ u_v, state, torch.matmul)
    y = (q * from_start) @ before + ((q @ k.mT) * decay) @ (u_v - u_k @ before)
    return from_chunks(y, T), state
