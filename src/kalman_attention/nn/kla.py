"""The KLA layer (``fig:block_arch``, App. ``app:architecture``): Kalman filtering as a mixer.

::

    x -> in_proj -> stream, gate          [B, T, D] each
    u = SiLU(conv(stream))                causal, kernel 4
    u -> value, precision, key, query     what the token says, and what it asks
    y = kla_scan(...)                     posterior mean (and variance) of the read-out
    out_proj((y + skip u) SiLU(gate))     -> [B, T, d_model]

``read`` is everything up to the posterior, ``write`` everything after it; a posterior sample can
be put in between, which is how the marginal likelihood (KLA+) is estimated.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._typing import Keys, Mask, Precisions, Values
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.readout import sample_readout
from kalman_attention.nn.config import KLALayerConfig
from kalman_attention.nn.context import Context
from kalman_attention.nn.links import value_precision
from kalman_attention.nn.mixer import LayerOutput
from kalman_attention.nn.norms import l2_norm
from kalman_attention.nn.prior import LatentPrior
from kalman_attention.nn.short_conv import ShortConv
from kalman_attention.ops.contract import ScanOutput
from kalman_attention.ops.kla_scan import kla_scan, kla_step


class LayerState(NamedTuple):
    """What a KLA layer carries from one call to the next.

    Attributes:
        conv: the last K - 1 tokens that the convolution saw, ``[R, K - 1, D]``.
        belief: mean and variance of the latent, ``[R, N, D]`` each.
    """

    conv: Tensor
    belief: KLAState


class Evidence(NamedTuple):
    """What each token asks (q) and says (k, v, lam_v): the token inputs of ``kla_scan``."""

    q: Keys
    k: Keys
    v: Values
    lam_v: Precisions


class Readout(NamedTuple):
    """The posterior of the read-out, with what ``write`` needs beside it.

    Attributes:
        mean: ``[B, T, D]``.
        variance: likewise, or None when it was not asked for.
        stream: the convolved stream u, ``[B, T, D]``.
        gate: before its SiLU, ``[B, T, D]``.
        evidence: the inputs of the scan, for those who want to look inside.
        state: the state after the last token.
    """

    mean: Values
    variance: Values | None
    stream: Tensor
    gate: Tensor
    evidence: Evidence
    state: LayerState

    def sample(self, generator: torch.Generator | None = None) -> Values:
        """One draw from the posterior; differentiable in mean and variance."""
        if self.variance is None:
            raise ValueError("there is no variance to sample with: read(..., return_variance=True)")
        mean, variance = self.mean, self.variance
        noise = torch.randn(mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
        return sample_readout(mean, variance, noise)


class KLA(nn.Module):
    """Kalman linear attention, a drop-in sequence mixer.

    Args:
        config: options; ``KLALayerConfig(d_model=...)`` is the paper's block.

    Attributes:
        context: set while sequences are split over processes (``parallel``); None otherwise.
    """

    context: Context | None = None

    def __init__(self, config: KLALayerConfig) -> None:
        super().__init__()
        self.config = config
        d_model, D, N = config.d_model, config.width, config.d_state
        value = D if config.value == "project" else 0
        precision = D if config.precision_rank is None else config.precision_rank
        self._split = [value, precision, 2 * N]
        self.in_proj = nn.Linear(d_model, 2 * D, bias=False)
        self.conv = ShortConv(D, config.conv_kernel)
        # One product for all that the stream gives: the narrow key and query come for free.
        self.evidence_proj = nn.Linear(D, sum(self._split), bias=False)
        self.precision_up = None
        if config.precision_rank is not None:
            self.precision_up = nn.Linear(config.precision_rank, D, bias=False)
        self.prior = LatentPrior(config)
        self.skip = None if config.skip is None else nn.Parameter(torch.empty(D))
        self.out_proj = nn.Linear(D, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the skip to its start; the modules inside start themselves."""
        if self.skip is not None and self.config.skip is not None:
            nn.init.constant_(self.skip, self.config.skip)

    def init_state(self, batch_size: int, *, capacity: int = 0) -> LayerState:
        """State before the first token; its size does not depend on ``capacity``."""
        like = self.in_proj.weight
        return LayerState(self.conv.init_window(batch_size, like), self.prior.initial(batch_size))

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        return_variance: bool = False,
    ) -> LayerOutput:
        """Mix a sequence, going on from ``state``.

        Args:
            x: ``[B, T, d_model]``; T may be 0.
            state: state of the last call on the same rows; None starts from the prior.
            mask: ``[B, T]`` bool, False for padding, which leaves the state exactly as it was.
            cu_seqlens: borders of documents packed into one row (B = 1), ``[n + 1]`` int; states
                are then per document.
            return_variance: also return the posterior variance of the read-out.

        Returns:
            ``LayerOutput(y, variance, state)``.
        """
        found = self.read(x, state, mask, cu_seqlens, return_variance=return_variance)
        return LayerOutput(
            self.write(found.mean, found.stream, found.gate), found.variance, found.state
        )

    def step(
        self,
        x: Tensor,
        state: LayerState,
        *,
        mask: Mask | None = None,
        return_variance: bool = False,
    ) -> LayerOutput:
        """One token ``[B, d_model]`` (mask ``[B]``); equal to ``forward`` on a sequence of one."""
        found = self.read_step(x, state, mask=mask, return_variance=return_variance)
        return LayerOutput(
            self.write(found.mean, found.stream, found.gate), found.variance, found.state
        )

    def read(
        self,
        x: Tensor,
        state: LayerState | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        return_variance: bool = False,
    ) -> Readout:
        """Everything up to the posterior of the read-out; arguments as for ``forward``."""
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)  # whatever stands in padding, even NaN
        stream, gate = self.in_proj(x).chunk(2, -1)  # [B, T, D] each
        window, belief = (None, None) if state is None else state
        scan: Callable[..., ScanOutput] = kla_scan
        if self.context is not None:
            first = self.conv.init_window(x.shape[0], stream) if window is None else window
            window = self.context.window(stream, first, mask, cu_seqlens)
            scan = self.context.scan
        u, window = self.conv(stream, window, mask, cu_seqlens)
        u = nn.functional.silu(u)
        evidence = self.evidence(u)
        if belief is None and self.config.prior != "unit":
            belief = self.prior.initial(x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1)
        a_bar, p_bar = (_match(z, evidence.v) for z in self.prior())
        y, y_var, belief = scan(
            *evidence,
            a_bar,
            p_bar,
            state=None if belief is None else KLAState(*(_match(z, evidence.v) for z in belief)),
            mask=mask,
            cu_seqlens=cu_seqlens,
            return_variance=return_variance,
            engine=self.config.engine or "auto",
        )
        return Readout(y, y_var, u, gate, evidence, LayerState(window, belief))

    def read_step(
        self,
        x: Tensor,
        state: LayerState,
        *,
        mask: Mask | None = None,
        return_variance: bool = False,
    ) -> Readout:
        """``read`` for one token, ``[B, d_model]``, with the discretised dynamics remembered."""
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        stream, gate = self.in_proj(x).chunk(2, -1)  # [B, D] each
        u, window = self.conv.step(stream, state.conv, mask)
        u = nn.functional.silu(u)
        evidence = self.evidence(u)
        a_bar, p_bar = (_match(z, evidence.v) for z in self.prior.cached())
        belief = KLAState(*(_match(z, evidence.v) for z in state.belief))
        y, y_var, belief = kla_step(
            *evidence,
            a_bar,
            p_bar,
            belief,
            mask=mask,
            return_variance=return_variance,
            engine=self.config.engine or "auto",
        )
        return Readout(y, y_var, u, gate, evidence, LayerState(window, belief))

    def evidence(self, u: Tensor) -> Evidence:
        """Value, precision, key and query from the convolved stream ``[..., D]``."""
        value, raw, key_query = self.evidence_proj(u).split(self._split, -1)
        if self.precision_up is not None:
            raw = self.precision_up(raw)
        lam_v = value_precision(raw, self.config.precision_link, self.config.precision_floor)
        key_query = key_query.unflatten(-1, (2, self.config.d_state))
        if self.config.qk_norm:
            key_query = l2_norm(key_query)
        k, q = key_query.unbind(-2)
        return Evidence(q, k, u if self.config.value == "stream" else value, lam_v)

    def write(self, latent: Values, stream: Tensor, gate: Tensor) -> Tensor:
        """From a read-out to the layer's output: skip, gate, output projection.

        Args:
            latent: the posterior mean, or samples, ``[..., T, D]``; leading axes broadcast.
            stream: of the ``Readout``, ``[B, T, D]``.
            gate: likewise.

        Returns:
            ``[..., T, d_model]``.
        """
        if self.skip is not None:
            latent = torch.addcmul(latent, stream, self.skip.to(latent.dtype))
        y: Tensor = self.out_proj(latent * nn.functional.silu(gate))
        return y

    def extra_repr(self) -> str:
        """The options that shape the filter."""
        names = ("value", "precision_rank", "process_noise", "discretisation", "prior")
        return ", ".join(f"{name}={getattr(self.config, name)}" for name in names)


def _match(x: Tensor, tokens: Tensor) -> Tensor:
    """Float32, or float64 where the tokens are."""
    return x.to(torch.float64 if tokens.dtype == torch.float64 else torch.float32)
