"""One model, two exact filters: ``kla_scan`` for a single latent, matrices for a sum of them.

With one latent per series, the textbook model is the filter of the library with one slot: keys are
1, the precision of a value is 1 / r, a channel is a set of parameters, and ``dt`` is the gap. A
diffuse level needs no limit there: after its first value it is exactly N(value, r). Of a sum of
components only the sum is observed, which couples them; ``dense`` is the filter for that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kalman_attention.filtering import innovation, moment
from kalman_attention.filtering.gaps import transition
from kalman_attention.filtering.moment import KLAState
from kalman_attention.ops.kla_scan import kla_scan
from kalman_attention.ops.smooth import kla_smooth
from kalman_attention.series import dense
from kalman_attention.series.components import (
    INTERCEPT,
    IRREGULAR,
    Component,
    Parameter,
    full_names,
)


class Reading(NamedTuple):
    """Mean and variance of a signal, ``[B, T, c]`` and ``[B, T]``, for c columns of values."""

    mean: Tensor
    variance: Tensor


class Values(NamedTuple):
    """Input of a filter: values ``[B, T, c]``, which are observed, and the time before each."""

    v: Tensor
    seen: Tensor
    dt: Tensor


class Filter(Protocol):
    """A model with its parameters, on a panel."""

    def log_likelihood(self) -> Tensor:
        """Log density of every series under every set of parameters, ``[S, B]``."""

    def predicted(self) -> Reading:
        """The signal before each value."""

    def filtered(self) -> Reading:
        """The signal after each value."""

    def smoothed(self) -> Reading:
        """The signal given all values."""


@dataclass(frozen=True)
class Structure:
    """The components of a series, and whether it has a constant.

    Attributes:
        components: at least one component.
        intercept: whether a constant is fitted; a diffuse component already includes one.
    """

    components: tuple[Component, ...]
    intercept: bool

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All fitted parameters, with full names: noise, components in order, intercept."""
        return (IRREGULAR, *full_names(self.components), *([INTERCEPT] if self.intercept else []))

    @property
    def diffuse(self) -> int:
        """Number of latents with a diffuse start."""
        return sum(component.size for component in self.components if component.diffuse)

    def bind(self, theta: Tensor, values: Values, unit: float, only: int | None = None) -> Filter:
        """The exact filter for this model on these values.

        Args:
            theta: sets of parameters, ``[S, K]``, in the order of ``parameters``.
            values: the values; more than one column needs S = 1.
            unit: unit of ``dt`` for ``kla_scan``; every choice is exact.
            only: index of the component to read; None reads the sum.
        """
        r, parts, constant = self._split(theta)
        v = values.v if constant is None else values.v - constant.view(-1, 1, 1, 1)
        v = v.expand(len(theta), *values.v.shape)
        (first, *others) = self.components
        begun = bool(values.seen[:, 0].all())
        if first.scalar and not others and (begun or not first.diffuse):
            return _SlotFilter(first, parts[0], r, values._replace(v=v), unit)
        system = _system(self.components, parts, r, values.dt)
        sizes = [component.size for component in self.components]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        q = system.h
        if only is not None:
            q = torch.zeros_like(system.h)
            q[starts[only]] = 1.0
        return _MatrixFilter(system, values._replace(v=v), q)

    def draw(
        self, theta: Tensor, dt: Tensor, num_samples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw signals without the constant, and their noise, ``[num_samples, T]`` each.

        Args:
            theta: parameters, ``[K]``.
            dt: time before each value, ``[T]``.
            num_samples: number of signals.
            generator: source of randomness.
        """
        r, parts, _ = self._split(theta[None])
        system = _system(self.components, parts, r, dt[None])
        T, d = len(dt), len(system.h)
        noise = torch.randn(T + 1, num_samples, d + 1, generator=generator, dtype=theta.dtype)
        roots, z = _root(system.Q[0, 0]), noise[T, :, :d] @ _root(system.P_0[0]).mT
        signal = torch.empty(T, num_samples, dtype=theta.dtype)
        for t in range(T):
            z = z @ system.F[0, 0, t].mT + noise[t, :, :d] @ roots[t].mT
            signal[t] = z @ system.h
        return signal.T, r.sqrt() * noise[:T, :, d].T

    def _split(self, theta: Tensor) -> tuple[Tensor, list[list[Tensor]], Tensor | None]:
        columns = [column.view(-1, 1, 1) for column in theta.unbind(-1)]
        parts, at = [], 1
        for component in self.components:
            n = len(component.parameters)
            parts.append(columns[at : at + n])
            at += n
        return theta[:, 0], parts, theta[:, -1] if self.intercept else None


class _SlotFilter:
    """A single latent: the op of the library, with a channel per set of parameters or draw."""

    def __init__(
        self, component: Component, theta: Sequence[Tensor], r: Tensor, values: Values, unit: float
    ) -> None:
        one = torch.full((1, 1), unit, dtype=r.dtype)
        (S, B, T, c), self.sets = values.v.shape, len(r)
        self.a_bar, self.p_bar = (x.view(1, S) for x in component.transition(theta, one))
        # Sets of parameters and columns of values are both channels; one of them is 1.
        self.v = values.v.permute(1, 2, 0, 3).reshape(B, T, S * c)
        self.dt, self.ones = values.dt / unit, torch.ones(B, T, 1, dtype=r.dtype)
        if c > 1:
            self.a_bar, self.p_bar = self.a_bar.expand(1, c), self.p_bar.expand(1, c)
        self.lam_v = (values.seen.unsqueeze(-1) / r).expand(B, T, S * c)
        self.spent = 0
        if component.diffuse:
            start = KLAState(self.v[:, :1], r.expand(B, 1, S * c))
            later = torch.arange(T).view(1, T, 1) > 0
            self.lam_v, self.spent = torch.where(later, self.lam_v, 0.0), 1
        else:
            variance = component.stationary(theta).view(1, 1, S).expand(B, 1, S * c)
            start = KLAState(torch.zeros_like(variance), variance)
        self.start = KLAState(*(x.contiguous() for x in start))

    def _call(self) -> tuple[Tensor, ...]:
        return self.ones, self.ones, self.v, self.lam_v, self.a_bar, self.p_bar

    def _filtered(self) -> KLAState:
        found = kla_scan(*self._call(), dt=self.dt, state=self.start, return_variance=True)
        assert found.y_var is not None
        return KLAState(found.y, found.y_var)

    def _priors(self) -> KLAState:
        """States before each token, ``[B, T, 1, S c]``, predicted from those after the previous."""
        before = KLAState(
            *(
                torch.cat([x, y[:, :-1]], 1)
                for x, y in zip(self.start, self._filtered(), strict=True)
            )
        )
        over = transition(self.a_bar, self.p_bar, self.dt.unsqueeze(-1))
        return moment.predict(KLAState(*(x.unsqueeze(-2) for x in before)), over.a, over.p)

    def log_likelihood(self) -> Tensor:
        density = innovation.log_likelihood(self._priors(), self.ones, self.v, self.lam_v)
        return density.sum((1, 2)).T - 0.5 * self.spent * math.log(2.0 * math.pi)

    def predicted(self) -> Reading:
        found = _reading(*(x.squeeze(-2) for x in self._priors()))
        if not self.spent:
            return found
        mean, variance = found.mean.clone(), found.variance.clone()
        mean[:, 0], variance[:, 0] = math.nan, math.inf
        return Reading(mean, variance)

    def filtered(self) -> Reading:
        return _reading(*self._filtered())

    def smoothed(self) -> Reading:
        found = kla_smooth(*self._call(), dt=self.dt, state=self.start)
        assert found.y_var is not None
        return _reading(found.y, found.y_var)


class _MatrixFilter:
    """Several latents: ``dense``, with a column per draw."""

    def __init__(self, system: dense.System, values: Values, q: Tensor) -> None:
        self.system, self.values, self.q = system, values, q

    def log_likelihood(self) -> Tensor:
        return dense.log_likelihood(self.system, self.values.v, self.values.seen)

    def predicted(self) -> Reading:
        return self._read(dense.predictions(self.system, self._filtered()), before=True)

    def filtered(self) -> Reading:
        return self._read(self._filtered())

    def smoothed(self) -> Reading:
        found = dense.smooth_series(self.system, self.values.v, self.values.seen)
        return self._read(found, whole=True)

    def _filtered(self) -> dense.Beliefs:
        return dense.filter_series(self.system, self.values.v, self.values.seen)

    def _read(
        self, beliefs: dense.Beliefs, *, whole: bool = False, before: bool = False
    ) -> Reading:
        start = None
        if self.system.diffuse:
            expected = dense.predictions(self.system, self._filtered())
            at = dense.innovations(self.system, self.values.v, expected)
            start = dense.diffuse_start(self.system, at, self.values.seen)
            start = start.from_all() if whole else start.from_earlier() if before else start
        mean, variance = dense.read(beliefs, start, self.q)
        return Reading(mean[0], variance[0])


def _reading(mean: Tensor, variance: Tensor) -> Reading:
    """Channels are draws, which all have the same variance."""
    return Reading(mean, variance[..., 0])


def _system(
    components: Sequence[Component], parts: Sequence[Sequence[Tensor]], r: Tensor, dt: Tensor
) -> dense.System:
    """The components as one model: block-diagonal dynamics, with their first latents observed."""
    over = [c.transition(theta, dt) for c, theta in zip(components, parts, strict=True)]
    start = [c.stationary(theta) for c, theta in zip(components, parts, strict=True)]
    each = [[float(i == 0) for i in range(c.size)] for c in components]
    free = [c.diffuse for c in components for _ in range(c.size)]
    return dense.System(
        F=_block_diagonal([F for F, _ in over]),
        Q=_block_diagonal([Q for _, Q in over]),
        P_0=_block_diagonal(start),
        r=r,
        h=torch.tensor([x for part in each for x in part], dtype=r.dtype),
        diffuse=tuple(i for i, diffuse in enumerate(free) if diffuse),
    )


def _root(covariance: Tensor) -> Tensor:
    """A matrix square root, also of singular covariances."""
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = vectors * values.clamp(min=0.0).sqrt().unsqueeze(-2)
    return root


def _block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """Matrices ``[..., d, d]`` along the diagonal of a larger one."""
    d, at, rows = sum(x.shape[-1] for x in blocks), 0, []
    for x in blocks:
        size = x.shape[-1]
        rows.append(torch.nn.functional.pad(x, (at, d - at - size)))
        at += size
    return torch.cat(rows, -2)
