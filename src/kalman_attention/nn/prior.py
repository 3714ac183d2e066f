"""The learned prior on the latent: how it moves between tokens, and where it starts."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._typing import Dynamics
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.ou import discretise
from kalman_attention.nn.config import KLAConfig
from kalman_attention.nn.float32 import KeepsFloat32
from kalman_attention.nn.links import inverse_softplus, log_uniform


class PriorValues(NamedTuple):
    """What is known of the latent before any token.

    Attributes:
        a_bar: decay per token, ``[N, D]``.
        p_bar: variance of the process noise per token, ``[N, D]``.
        belief: before the first token, ``[rows, N, D]``.
    """

    a_bar: Dynamics
    p_bar: Dynamics
    belief: KLAState


class LatentPrior(KeepsFloat32):
    """Parameters log_a, raw_p, raw_dt of the Ornstein-Uhlenbeck process and the first belief.

    They stay float32 when the model is converted to a shorter type: a decay of 0.9999 has no
    bfloat16. A conversion to float64 goes through.

    Args:
        config: options of the layer.
    """

    parameter_group: ClassVar[str] = "state_space"

    def __init__(self, config: KLAConfig) -> None:
        super().__init__()
        self.config = config
        shape = (config.d_state, config.width)
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)

        def parameter(needed: bool, learned: bool = True) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, dtype=dtype), learned) if needed else None

        noisy = config.process_noise != "zero"
        self.log_a = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.raw_p = parameter(noisy, config.process_noise == "learned")
        self.raw_dt = parameter(config.discretisation != "none")
        self.mean_0 = parameter(config.prior == "learned")
        self.log_variance_0 = parameter(config.prior == "learned")
        self._cached: tuple[tuple[Any, ...], PriorValues] | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start afresh: rates and diffusion as configured, step sizes log-uniform."""
        if self.log_a.is_meta:
            return  # nothing to start, and torch would import its compiler for it
        config, like = self.config, self.log_a
        shape, low_high = (config.d_state, config.width), config.decay_rates
        dt = log_uniform(shape, config.dt_min, config.dt_max, like.dtype).to(like.device)
        a = torch.linspace(*low_high, config.d_state, dtype=like.dtype, device=like.device)
        a, p = a.unsqueeze(1).expand(shape), torch.full_like(dt, config.diffusion)
        if self.raw_dt is None:
            # The same decays and noise to begin with: only what is learned differs.
            a, p = a * dt, p * dt.sqrt()
        else:
            self.raw_dt.copy_(inverse_softplus(dt))
        self.log_a.copy_(a.log())
        if self.raw_p is not None:
            self.raw_p.copy_(inverse_softplus(p))
        for first in (self.mean_0, self.log_variance_0):
            if first is not None:
                first.zero_()

    def forward(self, rows: int = 0) -> PriorValues:
        """Discretised dynamics, and the belief before the first token of ``rows`` sequences.

        Without rows, the dynamics are noted for ``cached``.
        """
        a, p, dt = self._continuous()
        if self.config.discretisation == "ou":
            a_bar, p_bar = discretise(a, p, dt)
        else:
            a_bar, p_bar = torch.exp(-a * dt), p * p * dt
        found = PriorValues(a_bar, p_bar, self._initial(rows, a * dt, p_bar))
        if rows == 0 and not torch.compiler.is_compiling():
            self._cached = None if found.a_bar.requires_grad else (self._fingerprint(), found)
        return found

    def cached(self) -> PriorValues:
        """The same, without computing anything as long as no parameter has changed.

        For decoding. Knows of every change that torch counts: optimiser steps, loading, moving.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self._cached is None:
            return self()  # type: ignore[no-any-return]
        version, found = self._cached
        return found if version == self._fingerprint() else self()

    def _initial(self, rows: int, rate: Tensor, p_bar: Dynamics) -> KLAState:
        if self.mean_0 is not None and self.log_variance_0 is not None:
            first = (self.mean_0, self.log_variance_0.exp())
            return KLAState(*(x.expand(rows, -1, -1) for x in first))
        shape, like = (rows, *self.log_a.shape), self.log_a
        if self.config.prior == "stationary":
            # p_bar / (1 - a_bar^2), which for the exact discretisation is p^2 / (2 a).
            variance = p_bar / -torch.expm1(-2.0 * rate)
            return KLAState(variance.new_zeros(shape), variance.expand(shape))
        return KLAState.unit_prior(*shape, dtype=like.dtype, device=like.device)

    def _continuous(self) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(self.log_a.dtype, torch.float32)
        a = self.log_a.to(dtype).exp()
        p = (
            torch.zeros_like(a)
            if self.raw_p is None
            else nn.functional.softplus(self.raw_p.to(dtype))
        )
        dt = (
            torch.ones_like(a)
            if self.raw_dt is None
            else nn.functional.softplus(self.raw_dt.to(dtype))
        )
        return a, p, dt

    def _fingerprint(self) -> tuple[Any, ...]:
        own = (self.log_a, self.raw_p, self.raw_dt)
        return tuple(
            (x.data_ptr(), None if x.is_inference() else x._version) for x in own if x is not None
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LatentPrior":
        self._cached = None
        return super()._apply(fn, recurse)
