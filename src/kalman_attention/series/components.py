r"""Components of a series: latents in continuous time, each with an exact transition over a gap.

A series is the sum of its components, an intercept and the noise of each observation. Every
component is a linear stochastic differential equation, so its transition over a gap dt is a matrix
F and a noise covariance Q that are known in closed form:

=========  =================================  ======================================================
``level``  dz = sigma dW                      random walk with a diffuse start
``trend``  dz = s dt + sigma dW, ds = tau dU  level with a slope that varies, both diffuse
``ou``     dz = -a z dt + sigma dW            returns to 0, stationary
``cycle``  a rotating OU process              damped oscillation of two latents, stationary
``ar``     z_t = phi z_{t-1} + e_t            on a grid of whole steps; phi may be negative
=========  =================================  ======================================================

Variances named ``sigma2`` are per unit of time, so that they do not depend on the spacing, except
that of ``irregular``, the noise of an observation.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kalman_attention._text import unknown
from kalman_attention.filtering.ou import discretise, stationary_variance

Transition = tuple[Tensor, Tensor]
"""Matrix F and noise covariance Q over the gap before each token, ``[S, B, T, d, d]``."""

_MARGIN = math.log(1e8)  # how far a parameter may leave the range of its starting values


class Scales(NamedTuple):
    """Scales of the data, before anything is fitted.

    Attributes:
        variance: variance of the values.
        gap: typical time between two values.
        span: time between the first and the last value.
    """

    variance: float
    gap: float
    span: float


@dataclass(frozen=True)
class Parameter:
    """A fitted parameter.

    Attributes:
        name: name of the parameter, such as ``rate``; the label of its component is appended,
            unless the name contains a dot.
        power: power of the unit of the values in which it is measured: 2 for a variance.
        between: the range of starting values, from the scales of the data.
        kind: ``positive`` is fitted by its logarithm, ``coefficient`` lies in (-1, 1).
        bounded: whether the range also limits the fitted value.
    """

    name: str
    power: int
    between: Callable[[Scales], tuple[float, float]]
    kind: str = "positive"
    bounded: bool = False

    def link(self, x: Tensor, scales: Scales) -> Tensor:
        """The parameter from an unconstrained number; smooth, and cannot overflow."""
        if self.kind == "real":
            return x
        if self.kind == "coefficient":
            return torch.tanh(x)
        middle, reach = self._logs(scales)
        return torch.exp(middle + reach * torch.tanh(x / reach))

    def check(self, value: float) -> None:
        """Raise if the value is invalid; only the observation noise must not be 0."""
        low, high = {"positive": (0.0, math.inf), "coefficient": (-1.0, 1.0)}.get(
            self.kind, (-math.inf, math.inf)
        )
        still = value == 0.0 and self.power == 2 and self.name != "sigma2.irregular"
        if not (low < value < high or still):
            raise ValueError(f"{self.name} is {value}: it must be in ({low:g}, {high:g}).")

    def start(self, share: Tensor, scales: Scales) -> Tensor:
        """The unconstrained number at a share in (0, 1) of the range of starting values."""
        if self.kind != "positive":
            return 2.0 * (2.0 * share - 1.0) if self.kind == "coefficient" else 0.0 * share
        low, high = (math.log(end) for end in self.between(scales))
        middle, reach = self._logs(scales)
        return reach * torch.atanh((low + share * (high - low) - middle) / reach)

    def _logs(self, scales: Scales) -> tuple[float, float]:
        low, high = (math.log(end) for end in self.between(scales))
        return 0.5 * (low + high), 0.5 * (high - low) + (0.0 if self.bounded else _MARGIN)


def _rate(scales: Scales) -> tuple[float, float]:
    """From a process that hardly decays over the series to one that decays within a gap."""
    return 1e-2 / scales.span, 20.0 / scales.gap  # 1 % over the series, e^-20 over a gap


def _wander(scales: Scales) -> tuple[float, float]:
    """From a process that moves little over the whole series to one that does so within a gap."""
    return 1e-2 * scales.variance / scales.span, scales.variance / scales.gap


def _wander_of_slope(scales: Scales) -> tuple[float, float]:
    low, high = _wander(scales)
    return low / (scales.gap * scales.span), high / (scales.gap * scales.span)


IRREGULAR = Parameter("sigma2.irregular", 2, lambda s: (1e-4 * s.variance, s.variance))
"""Variance of the noise of an observation."""

INTERCEPT = Parameter("intercept", 1, lambda s: (0.0, 0.0), kind="real")
"""Constant that a series without diffuse components varies about."""


class Component(ABC):
    """One latent process.

    Attributes:
        label: its name in a formula and in the names of its parameters.
        size: number of latents, of which the first is observed.
        diffuse: whether its start is diffuse, rather than its stationary distribution.
        scalar: whether it is a single latent with a decay in (0, 1], as in ``kla_scan``.
        continuous: whether it is defined at any time, and not only on a grid.
    """

    label: ClassVar[str]
    size: ClassVar[int] = 1
    diffuse: ClassVar[bool] = False
    scalar: ClassVar[bool] = False
    continuous: ClassVar[bool] = True

    @property
    @abstractmethod
    def parameters(self) -> tuple[Parameter, ...]:
        """The fitted parameters, in the order that ``transition`` expects."""

    @abstractmethod
    def transition(self, theta: Sequence[Tensor], dt: Tensor) -> Transition:
        """Exact dynamics over a gap.

        Args:
            theta: values of the parameters, ``[S, 1, 1]`` each, for S sets at once.
            dt: time before each token, ``[B, T]``.
        """

    def stationary(self, theta: Sequence[Tensor]) -> Tensor:
        """Covariance before the first value, ``[S, d, d]``; zeros for a diffuse start."""
        return torch.zeros(len(theta[0]), self.size, self.size, dtype=theta[0].dtype)

    def check(self, dt: Tensor) -> None:
        """Raise if the process is not defined for these gaps; most are defined for all."""
        return

    def __add__(self, other: "Component | list[Component]") -> list["Component"]:
        return [self, *(other if isinstance(other, list) else [other])]

    def __radd__(self, other: list["Component"]) -> list["Component"]:
        return [*other, self]


@dataclass(frozen=True)
class Level(Component):
    """Random walk; with observation noise, the local level model."""

    label = "level"
    diffuse = True
    scalar = True

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Variance added per unit of time."""
        return (Parameter("sigma2", 2, _wander),)

    def transition(self, theta: Sequence[Tensor], dt: Tensor) -> Transition:
        """F = 1, Q = sigma2 dt."""
        noise = theta[0] * dt
        return _matrix([[torch.ones_like(noise)]]), _matrix([[noise]])


@dataclass(frozen=True)
class OU(Component):
    """Ornstein-Uhlenbeck process: AR(1) in continuous time, the prior of ``kla_scan``."""

    label = "ou"
    scalar = True

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Decay rate, and variance of the noise per unit of time."""
        return Parameter("rate", 0, _rate, bounded=True), Parameter("sigma2", 2, _wander)

    def transition(self, theta: Sequence[Tensor], dt: Tensor) -> Transition:
        """``filtering.ou.discretise`` over the gap."""
        a_bar, p_bar = discretise(theta[0], theta[1].sqrt(), dt)
        return _matrix([[a_bar]]), _matrix([[p_bar]])

    def stationary(self, theta: Sequence[Tensor]) -> Tensor:
        """Variance sigma2 / (2 a)."""
        return stationary_variance(theta[0], theta[1].sqrt())


@dataclass(frozen=True)
class AR1(Component):
    """Autoregression of order one, on a grid: gaps are whole multiples of a step.

    Args:
        step: length of a step, in the unit of the time stamps.
    """

    label = "ar"
    continuous = False
    step: float = 1.0

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Coefficient in (-1, 1), and variance of the noise of a step."""
        coefficient = Parameter("ar.L1", 0, lambda s: (-1.0, 1.0), kind="coefficient")
        return coefficient, Parameter("sigma2", 2, lambda s: (1e-4 * s.variance, s.variance))

    def transition(self, theta: Sequence[Tensor], dt: Tensor) -> Transition:
        """F = phi^n and Q = sigma2 (1 - phi^2n) / (1 - phi^2), over n steps."""
        phi, sigma2 = theta
        steps = (dt / self.step).round()
        gain = phi.abs().pow(steps) * torch.where(steps % 2 == 1, phi.sign(), 1.0)
        return _matrix([[gain]]), _matrix([[sigma2 * (1.0 - gain * gain) / (1.0 - phi * phi)]])

    def stationary(self, theta: Sequence[Tensor]) -> Tensor:
        """Variance sigma2 / (1 - phi^2)."""
        return theta[1] / (1.0 - theta[0] * theta[0])

    def check(self, dt: Tensor) -> None:
        """Raise if a gap is not a whole number of steps."""
        steps = dt / self.step
        wrong = (steps - steps.round()).abs() > 1e-6 * steps.clamp(min=1.0)
        if wrong.any():
            raise ValueError(
                f"'ar' is defined for whole steps of {self.step:g}, but there is a gap of "
                f"{dt[wrong][0].item():g}. Pass AR1(step=...), or use 'ou', which is the same "
                "process in continuous time."
            )


@dataclass(frozen=True)
class Trend(Component):
    """Local linear trend in continuous time: a level, and a slope that is a random walk.

    Args:
        smooth: whether only the slope has noise (integrated random walk).
    """

    label = "trend"
    size = 2
    diffuse = True
    smooth: bool = False

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Variance added per unit of time to the slope, and to the level unless smooth."""
        slope = Parameter("sigma2.slope", 2, _wander_of_slope)
        return (slope,) if self.smooth else (slope, Parameter("sigma2", 2, _wander))

    def transition(self, theta: Sequence[Tensor], dt: Tensor) -> Transition:
        """F = [[1, dt], [0, 1]]; the slope's noise enters the level by dt^2 / 2 and dt^3 / 3."""
        slope = theta[0] * dt
        level = slope * dt * dt / 3.0 + (0.0 if self.smooth else theta[1] * dt)
        one, cross = torch.ones_like(slope), 0.5 * slope * dt
        F = [[one, dt.expand_as(slope)], [torch.zeros_like(slope), one]]
        return _matrix(F), _matrix([[level, cross], [cross, slope]])


@dataclass(frozen=True)
class Cycle(Component):
    """Damped oscillation: two latents that rotate into each other and decay at the same rate.

    Args:
        period: lower and upper limit of the period; by default two gaps and the span.
    """

    label = "cycle"
    size = 2
    period: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.period is not None and not 0.0 < self.period[0] < self.period[1]:
            raise ValueError(f"period is {self.period}: pass (shortest, longest), both positive.")

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Period, decay rate, and variance of the noise of both latents per unit of time."""
        limits = self.period
        period = Parameter("period", 0, lambda s: limits or (2.0 * s.gap, s.span), bounded=True)
        return period, Parameter("rate", 0, _rate, bounded=True), Parameter("sigma2", 2, _wander)

    def transition(self, theta: Sequence[Tensor], dt: Tensor) -> Transition:
        """A decay times a rotation; the noise is the same in every direction."""
        period, rate, sigma2 = theta
        a_bar, p_bar = discretise(rate, sigma2.sqrt(), dt)
        angle = 2.0 * math.pi * dt / period
        cos, sin, none = a_bar * torch.cos(angle), a_bar * torch.sin(angle), torch.zeros_like(a_bar)
        return _matrix([[cos, sin], [-sin, cos]]), _matrix([[p_bar, none], [none, p_bar]])

    def stationary(self, theta: Sequence[Tensor]) -> Tensor:
        """Variance sigma2 / (2 a) for both."""
        return stationary_variance(theta[1], theta[2].sqrt()) * torch.eye(2, dtype=theta[1].dtype)


COMPONENTS: dict[str, Callable[[], Component]] = {
    "level": Level,
    "trend": Trend,
    "smooth trend": lambda: Trend(smooth=True),
    "ou": OU,
    "cycle": Cycle,
    "ar": AR1,
}
"""Components by their name in a formula."""


def parse(formula: "str | Component | Sequence[Component]") -> list[Component]:
    """Components from a formula such as ``"level + cycle"``, a component or a sequence of them."""
    if isinstance(formula, Component):
        return [formula]
    if not isinstance(formula, str):
        found = list(formula)
        if not found or not all(isinstance(component, Component) for component in found):
            raise ValueError(f"components are {found}: pass a formula, or a list of components.")
        return found
    names = [" ".join(name.split()).lower() for name in formula.split("+")]
    for name in names:
        if name not in COMPONENTS:
            raise ValueError(unknown("component", name, COMPONENTS))
    return [COMPONENTS[name]() for name in names]


def labels(components: Sequence[Component]) -> list[str]:
    """Names of components; from the second of a kind on, they are numbered."""
    kinds = [component.label for component in components]
    counts = [kinds[:i].count(kind) + 1 for i, kind in enumerate(kinds)]
    return [kind if n == 1 else f"{kind}{n}" for kind, n in zip(kinds, counts, strict=True)]


def full_names(components: Sequence[Component]) -> list[Parameter]:
    """The parameters of all components, such as ``sigma2.level``, numbered like their labels."""
    found = []
    for component, label in zip(components, labels(components), strict=True):
        number = label.removeprefix(component.label)
        for p in component.parameters:
            name = p.name if "." in p.name else f"{p.name}.{component.label}"
            found.append(replace(p, name=name + number))
    return found


def _matrix(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Stack entries ``[S, B, T]`` into matrices ``[S, B, T, d, d]``."""
    return torch.stack([torch.stack(list(row), -1) for row in rows], -2)
