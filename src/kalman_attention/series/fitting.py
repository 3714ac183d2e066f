"""Maximum likelihood: many starts are looked at, the best are followed, and curvature is measured.

Parameters are fitted as numbers without limits (``Parameter.link``). Starts fill their range evenly
(a Sobol sequence) and are filtered in one batch. BFGS climbs from the best of them, all at once:
a filter of a few sets of parameters takes hardly longer than that of one, and with fewer than ten
parameters there is no reason to forget curvature, as L-BFGS does. The standard errors come from the
observed information, the second derivative of the negative log-likelihood at its minimum, as
differences of exact gradients.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kalman_attention.series.components import Scales
from kalman_attention.series.data import Panel
from kalman_attention.series.filters import Structure, Values

Array = NDArray[np.float64]

_SCREENED = 64
_BATCH = 400_000
"""Numbers of a covariance over all tokens and sets of parameters that are filtered at once."""
_LONGEST = 2.0
"""The most that a parameter moves in one step, on the scale of logarithms."""
_LEVEL = 1e-6
"""Gradient of the mean log-likelihood from which on Newton's method takes the last digits."""
_GAIN = 1e-10
"""Gain in mean log-likelihood that is not worth another filter."""
_STEP = 1e-4
"""Step of the differences of gradients, where rounding and curvature of a float64 cost the same."""
_FLAT = 1e-3
"""Curvature below which a parameter is not determined: its logarithm is unsure by more than 30."""


class Fit(NamedTuple):
    """Where the likelihood is largest.

    Attributes:
        theta: parameters, ``[K]``.
        covariance: of their estimates, ``[K, K]``; NaN where the data does not determine one.
        loglik: log-likelihood of all series there.
        found: log-likelihood that each start led to.
        gradient: largest entry of the gradient of the mean log-likelihood that is left.
    """

    theta: Tensor
    covariance: Tensor
    loglik: float
    found: list[float]
    gradient: float


class Objective:
    """Mean negative log-likelihood of a panel, as a function of numbers without limits.

    Args:
        structure: the model.
        values: what was seen.
        scales: sizes in the data, which give the links their units.
    """

    def __init__(self, structure: Structure, values: Values, scales: Scales) -> None:
        self.structure, self.values, self.scales = structure, values, scales
        self.count = int(values.seen.sum())

    def theta(self, x: Tensor) -> Tensor:
        """Parameters ``[..., K]`` from numbers without limits."""
        parameters = self.structure.parameters
        columns = zip(parameters, x.unbind(-1), strict=True)
        return torch.stack([p.link(column, self.scales) for p, column in columns], -1)

    def __call__(self, x: Tensor) -> Tensor:
        """For sets ``[S, K]``, ``[S]``."""
        bound = self.structure.bind(self.theta(x), self.values, self.scales.gap)
        return -bound.log_likelihood().sum(-1) / self.count

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``[S]`` and gradients ``[S, K]`` at sets ``[S, K]``; not a number is too high."""
        at = x.detach().clone().requires_grad_()
        heights = self(at)
        (found,) = torch.autograd.grad(heights.sum(), at)
        return heights.detach().nan_to_num(math.inf), found

    def starts(self, count: int) -> Tensor:
        """The best of many points that fill the range of every parameter, ``[count, K]``."""
        parameters = self.structure.parameters
        draw = torch.quasirandom.SobolEngine(len(parameters), scramble=True, seed=0).draw  # type: ignore[no-untyped-call]
        shares = draw(max(_SCREENED, count)).double().clamp(0.02, 0.98)
        columns = [p.start(shares[:, i], self.scales) for i, p in enumerate(parameters)]
        points = torch.stack(columns, -1)
        size = sum(component.size for component in self.structure.components) ** 2
        chunk = max(1, _BATCH // (self.values.seen.numel() * size))
        with torch.no_grad():
            heights = torch.cat([self(part) for part in torch.split(points, chunk)])
        best = heights.nan_to_num(math.inf).argsort()[:count]
        return points[best]


def fit(objective: Objective, starts: int, max_iter: int) -> Fit:
    """Climb the likelihood from several starts and keep the highest point.

    Args:
        objective: what to minimise.
        starts: number of points to go on from.
        max_iter: the most filters of all of them.
    """
    ends, heights = descend(objective, objective.starts(starts), max_iter)
    x = ends[heights.argmin()]
    hessian = information(objective, x)
    x = _newton(objective, x, hessian)
    height, gradient = objective.gradient(x[None])
    return Fit(
        theta=objective.theta(x).detach(),
        covariance=covariance(objective, x, hessian),
        loglik=-height.item() * objective.count,
        found=(-heights * objective.count).tolist(),
        gradient=gradient.abs().max().item(),
    )


def descend(objective: Objective, x: Tensor, max_iter: int) -> tuple[Tensor, Tensor]:
    """BFGS from every row of ``x`` side by side, each with a step length of its own.

    A row that gets lower moves on and updates its curvature; one that does not tries half the step.

    Returns:
        Where each row ended, ``[S, K]``, and how high, ``[S]``.
    """
    heights, slope = objective.gradient(x)
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    inverse, length = eye.repeat(len(x), 1, 1), torch.ones_like(heights)
    for _ in range(max_iter):
        step = -(inverse @ slope.unsqueeze(-1)).squeeze(-1)
        step = step * (_LONGEST / step.abs().amax(-1, keepdim=True)).clamp(max=1.0)
        step = step * length.unsqueeze(-1)
        expected = (step * slope).sum(-1)
        if bool(((slope.abs().amax(-1) < _LEVEL) | (expected.abs() < _GAIN)).all()):
            break
        new_heights, new_slope = objective.gradient(x + step)
        lower = new_heights <= heights + 1e-4 * expected
        change = torch.where(lower[:, None], new_slope - slope, 0.0)
        inverse = _bfgs(inverse, torch.where(lower[:, None], step, 0.0), change, eye)
        x = torch.where(lower[:, None], x + step, x)
        slope = torch.where(lower[:, None], new_slope, slope)
        heights = torch.where(lower, new_heights, heights)
        length = torch.where(lower, 1.0, 0.5 * length)
    return x, heights


def _bfgs(inverse: Tensor, step: Tensor, change: Tensor, eye: Tensor) -> Tensor:
    """The inverse curvature that explains the change of the gradient, if it curves upwards."""
    product = (step * change).sum(-1)
    curved = product > 1e-10 * step.norm(dim=-1) * change.norm(dim=-1)
    rho = torch.where(curved, 1.0 / product, 0.0)[:, None, None]
    left = eye - rho * step.unsqueeze(-1) * change.unsqueeze(-2)
    return left @ inverse @ left.mT + rho * step.unsqueeze(-1) * step.unsqueeze(-2)


def _newton(objective: Objective, x: Tensor, hessian: Tensor) -> Tensor:
    """One step of Newton's method, which takes the last digits, unless it leads upwards."""
    sure = _determined(hessian)
    (height,), (slope,) = objective.gradient(x[None])
    step = torch.zeros_like(x)
    step[sure] = torch.linalg.solve(hessian[sure][:, sure], slope[sure] * objective.count)
    (closer,), _ = objective.gradient((x - step)[None])
    return x - step if closer <= height else x


def information(objective: Objective, x: Tensor) -> Tensor:
    """Second derivative of the negative log-likelihood, ``[K, K]``: differences of gradients."""
    steps = _STEP * torch.eye(len(x), dtype=x.dtype)
    _, slopes = objective.gradient(torch.cat([x + steps, x - steps]))
    after, before = slopes.chunk(2)
    found: Tensor = (after - before) * (objective.count / (2.0 * _STEP))
    return 0.5 * (found + found.mT)


def _determined(hessian: Tensor) -> Tensor:
    """Which parameters the data determines; none where this is no minimum."""
    sure = torch.diagonal(hessian) > _FLAT
    convex = torch.linalg.eigvalsh(hessian[sure][:, sure]) > 0
    found: Tensor = sure & convex.all()
    return found


def covariance(objective: Objective, x: Tensor, hessian: Tensor) -> Tensor:
    """Covariance of the estimates at a maximum, ``[K, K]``, by the inverse of the information.

    Rows of parameters that the data does not determine (a variance that is 0) are NaN; the others
    are those of the model without them.

    Args:
        objective: whose links lead from the numbers without limits to the parameters.
        x: those numbers.
        hessian: ``information`` there.
    """
    at = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective.theta(at).sum(), at)  # links act one by one
    found = torch.full_like(hessian, math.nan)
    where = torch.where(_determined(hessian))[0]
    found[where[:, None], where] = torch.linalg.inv(hessian[where][:, where])
    return found * slope[:, None] * slope


@dataclass(frozen=True)
class Standard:
    """Centre and scale of the data: what is fitted has mean 0 and variance 1.

    Attributes:
        centre: of every series, ``[B]``.
        scale: one for all.
        scales: sizes of the scaled data.
        constant: whether all values of each series are the same.
    """

    centre: Tensor
    scale: float
    scales: Scales
    constant: bool

    @classmethod
    def of(cls, structure: Structure, panel: Panel) -> "Standard":
        """From a panel; only what an intercept or a diffuse start can take up is subtracted."""
        v, seen = panel.v, panel.seen
        centre = (v.sum(1) / seen.sum(1)).detach()
        if not structure.diffuse:
            centre = torch.full_like(centre, v[seen].mean().item() if structure.intercept else 0.0)
        rest = torch.where(seen, v - centre[:, None], 0.0)
        size = (rest.square().sum() / panel.nobs).sqrt().item()
        # Rounding of the mean must not look like a variance.
        constant = size <= 1e-12 * v.abs().max().item()
        scale = 1.0 if constant else size
        return cls(centre, scale, _usual_sizes(rest / scale, seen, panel.dt), constant)

    def values(self, panel: Panel) -> Values:
        """A panel in these units, with one column."""
        v = torch.where(panel.seen, panel.v - self.centre[:, None], 0.0) / self.scale
        return Values(v.unsqueeze(-1), panel.seen, panel.dt)

    def units(self, structure: Structure) -> Array:
        """What a parameter of the scaled data is multiplied with, ``[K]``."""
        return np.array([self.scale**parameter.power for parameter in structure.parameters])

    def outwards(self, structure: Structure, theta: Tensor) -> Array:
        """Parameters in the units of the user."""
        found: Array = theta.numpy() * self.units(structure)
        if structure.intercept:
            found[-1] += self.centre[0].item()
        return found

    def inwards(self, structure: Structure, params: Array) -> Tensor:
        """Parameters of the scaled data."""
        found = params.copy()
        if structure.intercept:
            found[-1] -= self.centre[0].item()
        return torch.from_numpy(found / self.units(structure))


def _usual_sizes(v: Tensor, seen: Tensor, dt: Tensor) -> Scales:
    """Variance of the values that are there, median gap and longest span."""
    spread = v[seen].var(correction=0).item() if int(seen.sum()) > 1 else 1.0
    gaps = dt[dt > 0]
    gap = gaps.median().item() if len(gaps) else 1.0
    span = max(dt.sum(1).max().item(), gap)
    return Scales(variance=spread or 1.0, gap=gap, span=max(span, 2.0 * gap))


def names(structure: Structure) -> Sequence[str]:
    """Names of all parameters, in order."""
    return [parameter.name for parameter in structure.parameters]
