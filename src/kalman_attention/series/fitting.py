"""Maximum likelihood from many starting points, with standard errors from the curvature.

Parameters are fitted as unconstrained numbers (``Parameter.link``). Starting points fill their
range evenly (a Sobol sequence) and are filtered in one batch. BFGS then runs from the best of them
in parallel: filtering a few sets of parameters takes hardly longer than filtering one, and with
fewer than ten parameters there is no reason to discard curvature, as L-BFGS does. Standard errors
come from the observed information, the second derivative of the negative log-likelihood at its
minimum, computed from differences of exact gradients.
"""

import math
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
"""Largest number of covariance entries per batch, over all tokens and sets of parameters."""
_LONGEST = 2.0
"""Largest change of a parameter in one step, on a logarithmic scale."""
_LEVEL = 1e-6
"""Gradient of the mean log-likelihood below which a Newton step refines the last digits."""
_GAIN = 1e-10
"""Gain in mean log-likelihood that is not worth another pass of the filter."""
_STEP = 1e-4
"""Step of the differences of gradients, which balances rounding and truncation in float64."""
_FLAT = 1e-3
"""Curvature below which a parameter is undetermined: its logarithm is uncertain by more than 30."""


class Fit(NamedTuple):
    """The maximum of the likelihood.

    Attributes:
        theta: parameters, ``[K]``.
        covariance: covariance of the estimates, ``[K, K]``; NaN where the data does not determine
            one.
        found: log-likelihood reached from each starting point.
        gradient: largest entry of the remaining gradient of the mean log-likelihood.
    """

    theta: Tensor
    covariance: Tensor
    found: list[float]
    gradient: float


class Objective:
    """Mean negative log-likelihood of a panel, as a function of unconstrained numbers.

    Args:
        structure: the model.
        values: the observed values.
        scales: scales of the data, the units of the links.
    """

    def __init__(self, structure: Structure, values: Values, scales: Scales) -> None:
        self.structure, self.values, self.scales = structure, values, scales
        self.count = int(values.seen.sum())

    def theta(self, x: Tensor) -> Tensor:
        """Parameters ``[..., K]`` from unconstrained numbers."""
        parameters = self.structure.parameters
        columns = zip(parameters, x.unbind(-1), strict=True)
        return torch.stack([p.link(column, self.scales) for p, column in columns], -1)

    def __call__(self, x: Tensor) -> Tensor:
        """Values ``[S]`` for sets ``[S, K]``."""
        bound = self.structure.bind(self.theta(x), self.values, self.scales.gap)
        return -bound.log_likelihood().sum(-1) / self.count

    def gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``[S]`` and gradients ``[S, K]`` at sets ``[S, K]``; NaN counts as infinite."""
        at = x.detach().clone().requires_grad_()
        heights = self(at)
        (found,) = torch.autograd.grad(heights.sum(), at)
        return heights.detach().nan_to_num(math.inf), found

    def starts(self, count: int) -> Tensor:
        """The best of many points that fill the range of every parameter, ``[count, K]``."""
        parameters = self.structure.parameters
        draw = torch.quasirandom.SobolEngine(len(parameters), scramble=True, seed=0).draw  # type: ignore[no-untyped-call]
        # Not the ends of a range, which a bounded link reaches only at infinity.
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
    """Maximise the likelihood from several starting points and keep the best result.

    Args:
        objective: the function to minimise.
        starts: number of starting points for BFGS.
        max_iter: maximum number of passes of the filter.
    """
    ends, heights = descend(objective, objective.starts(starts), max_iter)
    x = ends[heights.argmin()]
    hessian = information(objective, x)
    x = _newton(objective, x, hessian)
    _, gradient = objective.gradient(x[None])
    return Fit(
        theta=objective.theta(x).detach(),
        covariance=covariance(objective, x, hessian),
        found=(-heights * objective.count).tolist(),
        gradient=gradient.abs().max().item(),
    )


def descend(objective: Objective, x: Tensor, max_iter: int) -> tuple[Tensor, Tensor]:
    """BFGS from every row of ``x`` in parallel, each with its own step length.

    A row whose value decreases accepts the step and updates its curvature; otherwise the step is
    halved.

    Returns:
        The final point of each row, ``[S, K]``, and its value, ``[S]``.
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
        lower = new_heights <= heights + 1e-4 * expected  # Armijo's condition, its usual constant
        change = torch.where(lower[:, None], new_slope - slope, 0.0)
        inverse = _bfgs(inverse, torch.where(lower[:, None], step, 0.0), change, eye)
        x = torch.where(lower[:, None], x + step, x)
        slope = torch.where(lower[:, None], new_slope, slope)
        heights = torch.where(lower, new_heights, heights)
        length = torch.where(lower, 1.0, 0.5 * length)
    return x, heights


def _bfgs(inverse: Tensor, step: Tensor, change: Tensor, eye: Tensor) -> Tensor:
    """The BFGS update of the inverse Hessian, skipped where the curvature is not positive."""
    product = (step * change).sum(-1)
    # Positive curvature keeps the inverse positive definite, so that every step leads downhill.
    curved = product > 1e-10 * step.norm(dim=-1) * change.norm(dim=-1)
    rho = torch.where(curved, 1.0 / product, 0.0)[:, None, None]
    left = eye - rho * step.unsqueeze(-1) * change.unsqueeze(-2)
    return left @ inverse @ left.mT + rho * step.unsqueeze(-1) * step.unsqueeze(-2)


def _newton(objective: Objective, x: Tensor, hessian: Tensor) -> Tensor:
    """One Newton step, which refines the last digits, unless it increases the objective."""
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
    """Which parameters the data determines; none if this is not a minimum."""
    sure = torch.diagonal(hessian) > _FLAT
    convex = torch.linalg.eigvalsh(hessian[sure][:, sure]) > 0
    found: Tensor = sure & convex.all()
    return found


def covariance(objective: Objective, x: Tensor, hessian: Tensor) -> Tensor:
    """Covariance of the estimates at a maximum, ``[K, K]``, by the inverse of the information.

    Rows of parameters that the data does not determine (a variance of 0) are NaN; the others are
    those of the model without them.

    Args:
        objective: the objective, with the links from unconstrained numbers to parameters.
        x: the unconstrained numbers.
        hessian: ``information`` at x.
    """
    at = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective.theta(at).sum(), at)  # links are elementwise
    found = torch.full_like(hessian, math.nan)
    where = torch.where(_determined(hessian))[0]
    found[where[:, None], where] = torch.linalg.inv(hessian[where][:, where])
    return found * slope[:, None] * slope


@dataclass(frozen=True)
class Standard:
    """Centre and scale of the data: models are fitted to mean 0 and variance 1.

    Attributes:
        centre: centre of every series, ``[B]``.
        scale: one scale for all series.
        scales: scales of the standardised data.
        constant: whether all values of each series are the same.
    """

    centre: Tensor
    scale: float
    scales: Scales
    constant: bool

    @classmethod
    def of(cls, structure: Structure, panel: Panel) -> "Standard":
        """Of a panel; subtracts only what an intercept or a diffuse start can absorb."""
        v, seen = panel.v, panel.seen
        centre = (v.sum(1) / seen.sum(1)).detach()
        if not structure.diffuse:
            centre = torch.full_like(centre, v[seen].mean().item() if structure.intercept else 0.0)
        rest = torch.where(seen, v - centre[:, None], 0.0)
        size = (rest.square().sum() / panel.nobs).sqrt().item()
        # Rounding errors of the mean must not count as variance.
        constant = size <= 1e-12 * v.abs().max().item()
        scale = 1.0 if constant else size
        return cls(centre, scale, _usual_sizes(rest / scale, seen, panel.dt), constant)

    def values(self, panel: Panel) -> Values:
        """A panel in these units, with one column."""
        v = torch.where(panel.seen, panel.v - self.centre[:, None], 0.0) / self.scale
        return Values(v.unsqueeze(-1), panel.seen, panel.dt)

    def units(self, structure: Structure) -> Array:
        """Factors from parameters of the standardised data to the units of the user, ``[K]``."""
        return np.array([self.scale**parameter.power for parameter in structure.parameters])

    def outwards(self, structure: Structure, theta: Tensor) -> Array:
        """Parameters in the units of the user."""
        found: Array = theta.numpy() * self.units(structure)
        if structure.intercept:
            found[-1] += self.centre[0].item()
        return found

    def inwards(self, structure: Structure, params: Array) -> Tensor:
        """Parameters of the standardised data."""
        found = params.copy()
        if structure.intercept:
            found[-1] -= self.centre[0].item()
        return torch.from_numpy(found / self.units(structure))


def _usual_sizes(v: Tensor, seen: Tensor, dt: Tensor) -> Scales:
    """Variance of the observed values, median gap and longest span."""
    spread = v[seen].var(correction=0).item() if int(seen.sum()) > 1 else 1.0
    gaps = dt[dt > 0]
    gap = gaps.median().item() if len(gaps) else 1.0
    span = max(dt.sum(1).max().item(), gap)
    return Scales(variance=spread or 1.0, gap=gap, span=max(span, 2.0 * gap))
