"""The learned prior on the latent: how it moves between tokens, and where it starts."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention._typing import Dynamics
from kalman_attention.filtering.moment import KLAState
from kalman_attention.filtering.ou import discretise
from kalman_attention.nn.config import KLAConfig
from kalman_attention.nn.float32 import KeepsFloat32, at_least_float32, empty_parameter
from kalman_attention.nn.links import inverse_softplus, log_uniform, softplus


class PriorValues(NamedTuple):
    """The prior on the latent: its dynamics and the initial belief.

    Attributes:
        a_bar: decay per token, ``[G, D]``; G is N unless slots share a precision.
        p_bar: variance of the process noise per token, ``[G, D]``.
        belief: initial belief, ``[rows, N, D]`` and ``[rows, G, D]``.
    """

    a_bar: Dynamics
    p_bar: Dynamics
    belief: KLAState


class LatentPrior(KeepsFloat32):
    """Parameters log_a, raw_p, raw_dt of the Ornstein-Uhlenbeck process, and the initial belief.

    They stay float32 when the model is converted to a shorter dtype: bfloat16 cannot represent a
    decay of 0.9999. A conversion to float64 does apply.

    If tokens choose their step sizes (``step_rank``), there is no raw_dt: the dynamics are those of
    one unit of time, ``unit`` long, in which step sizes are measured.

    Args:
        config: options of the layer.
    """

    parameter_group: ClassVar[str] = "state_space"

    def __init__(self, config: KLAConfig) -> None:
        super().__init__()
        self.config = config

        def parameter(needed: bool, learned: bool = True, rows: int = 0) -> nn.Parameter | None:
            shape = (rows or config.blocks, config.width)
            return empty_parameter(*shape, learned=learned) if needed else None

        noisy, own = config.process_noise != "zero", config.prior == "learned"
        self.log_a = empty_parameter(config.blocks, config.width)
        self.raw_p = parameter(noisy, config.process_noise == "learned")
        self.raw_dt = parameter(config.discretisation != "none" and config.step_rank is None)
        self.mean_0 = parameter(own, rows=config.d_state)
        self.log_variance_0 = parameter(own)
        self._cached: tuple[tuple[Any, ...], PriorValues] | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise rates and diffusion as configured, step sizes log-uniformly."""
        if self.log_a.is_meta:
            return  # nothing to initialise, and torch would import its compiler for it
        config, like = self.config, self.log_a
        shape, low_high = like.shape, config.decay_rates
        a = torch.linspace(*low_high, config.blocks, dtype=like.dtype, device=like.device)
        a, p = a.unsqueeze(1).expand(shape), torch.full_like(like, config.diffusion)
        if config.step_rank is None:
            dt = log_uniform(shape, config.dt_min, config.dt_max, like.dtype).to(like.device)
            if self.raw_dt is None:
                # The same initial decays and noise as with a step size, in other parameters.
                a, p = a * dt, p * dt.sqrt()
            else:
                self.raw_dt.copy_(inverse_softplus(dt))
        self.log_a.copy_(a.log())
        if self.raw_p is not None:
            self.raw_p.copy_(inverse_softplus(p))
        if self.mean_0 is not None and self.log_variance_0 is not None:
            self.log_variance_0.zero_()
            self.mean_0.zero_()
            if config.initial_mean > 0.0:
                self.mean_0.normal_(std=config.initial_mean)

    @property
    def unit(self) -> float:
        """Length of the unit of time if tokens choose their step sizes."""
        # Within one unit the fastest slot initially decays by a factor of e, so that no decay is
        # close to 0 or to 1, where digits would be lost.
        return 1.0 / max(self.config.decay_rates)

    def forward(self, rows: int = 0) -> PriorValues:
        """Discretised dynamics, and the initial belief of ``rows`` sequences.

        With ``rows`` = 0 the result is also kept for ``cached``.
        """
        a, p, dt = self._continuous()
        if self.config.discretisation == "ou":
            a_bar, p_bar = discretise(a, p, dt)
        else:
            a_bar, p_bar = torch.exp(-a * dt), p * p * dt
        found = PriorValues(a_bar, p_bar, self._initial(rows, a * dt, p_bar))
        # Never cache what has a graph: a second backward pass through it would fail.
        if rows == 0 and not torch.compiler.is_compiling():
            self._cached = None if found.a_bar.requires_grad else (self._fingerprint(), found)
        return found

    def cached(self) -> PriorValues:
        """The same without ``rows``, cached as long as no parameter changes; for decoding.

        Detects every change that torch tracks: optimiser steps, loading, moving to a device.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self._cached is None:
            return self()  # type: ignore[no-any-return]
        version, found = self._cached
        return found if version == self._fingerprint() else self()

    def _initial(self, rows: int, rate: Tensor, p_bar: Dynamics) -> KLAState:
        if self.mean_0 is not None and self.log_variance_0 is not None:
            first = (self.mean_0, self.log_variance_0.exp())
            return KLAState(*(x.expand(rows, -1, -1) for x in first))
        like = self.log_a
        shape = (rows, self.config.d_state, like.shape[1])
        if self.config.prior == "stationary":
            # p_bar / (1 - a_bar^2), which for the exact discretisation is p^2 / (2 a).
            variance = p_bar / -torch.expm1(-2.0 * rate)
            return KLAState(variance.new_zeros(shape), variance.expand(rows, -1, -1))
        return KLAState(like.new_zeros(shape), like.new_ones(rows, *like.shape))

    def _continuous(self) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(self.log_a.dtype, torch.float32)
        a = self.log_a.to(dtype).exp()
        p = (
            torch.zeros_like(a)
            if self.raw_p is None
            else nn.functional.softplus(self.raw_p.to(dtype))
        )
        if self.raw_dt is not None:
            dt = nn.functional.softplus(self.raw_dt.to(dtype))
        else:
            dt = torch.full_like(a, 1.0 if self.config.step_rank is None else self.unit)
        return a, p, dt

    def _fingerprint(self) -> tuple[Any, ...]:
        # From the dictionary: this runs for every decoded token, and module attributes are slow.
        own = map(self._parameters.get, ("log_a", "raw_p", "raw_dt"))
        return tuple(
            (x.data_ptr(), None if x.is_inference() else x._version) for x in own if x is not None
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LatentPrior":
        self._cached = None
        return super()._apply(fn, recurse)


class TokenSteps(KeepsFloat32):
    """The step size before every token, chosen by the token: softplus(x + raw_dt) / unit.

    Args:
        config: options of the layer.
        unit: the step size that the dynamics belong to.
    """

    parameter_group: ClassVar[str] = "state_space"

    def __init__(self, config: KLAConfig, unit: float) -> None:
        super().__init__()
        self.config, self.unit = config, unit
        self.raw_dt = empty_parameter(config.width)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise step sizes log-uniformly over the channels."""
        if self.raw_dt.is_meta:
            return  # nothing to initialise, and torch would import its compiler for it
        config, like = self.config, self.raw_dt
        dt = log_uniform((config.width,), config.dt_min, config.dt_max, like.dtype)
        like.copy_(inverse_softplus(dt))

    def forward(self, x: Tensor) -> Tensor:
        """Step sizes ``[..., D]`` in units, at least float32, from projections of the tokens."""
        return softplus(x, self.raw_dt, scale=1.0 / self.unit)


class TimeTurns(KeepsFloat32):
    """Blocks of two slots that rotate as time passes, by exp(log_frequency) dt in rad.

    A block that rotates, decays and receives noise is an Ornstein-Uhlenbeck process in the plane.
    Rotations over two gaps add up, so only the gap before a token matters. A rotation is two
    reflections at half the angle to each other: the filter is that of ``filtering/rotation.py``,
    with directions determined by time.

    Args:
        config: options of the layer.
    """

    parameter_group: ClassVar[str] = "state_space"

    def __init__(self, config: KLAConfig) -> None:
        super().__init__()
        self.config = config
        self.log_frequency = empty_parameter(config.blocks)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise frequencies to even spacing in their logarithm."""
        if self.log_frequency.is_meta:
            return  # nothing to initialise, and torch would import its compiler for it
        assert self.config.frequencies is not None
        low, high = (math.log(frequency) for frequency in self.config.frequencies)
        self.log_frequency.copy_(torch.linspace(low, high, self.config.blocks))

    def forward(self, dt: Tensor) -> Tensor:
        """Reflections ``[..., 2, G, 2]`` for gaps ``[...]``, at least float32."""
        dtype = at_least_float32(dt.dtype)
        half = 0.5 * self.log_frequency.to(dtype).exp() * dt.to(dtype).unsqueeze(-1)  # [..., G]
        still = torch.stack([torch.ones_like(half), torch.zeros_like(half)], -1)
        return torch.stack([still, torch.stack([half.cos(), half.sin()], -1)], -3)
