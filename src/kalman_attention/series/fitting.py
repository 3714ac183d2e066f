"""Maximum likelihood: many starts are looked at, the best are followed, and curvature is measured.

Parameters are fitted as numbers without limits (``Parameter.link``). Starts fill their range evenly
(a Sobol sequence); all are filtered in one batch, and L-BFGS goes on from the best of them. The
standard errors come from the observed information, the second derivative of the negative
log-likelihood at its minimum, as differences of exact gradients.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention.series.components import Scales
from kalman_attention.series.filters import Structure, Values

_SCREENED = 64
_BATCH = 400_000
"""Numbers of a covariance over all tokens and sets of parameters that are filtered at once."""
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

    def gradient(self, x: Tensor) -> Tensor:
        """At one set, ``[K]``."""
        at = x.detach().clone().requires_grad_()
        (found,) = torch.autograd.grad(self(at[None]).sum(), at)
        return found

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
    """Follow the likelihood upwards from several starts and keep the highest point.

    Args:
        objective: what to minimise.
        starts: number of points to go on from.
        max_iter: steps of L-BFGS from each.
    """
    ends = [_descend(objective, x, max_iter) for x in objective.starts(starts)]
    with torch.no_grad():
        heights = [float(objective(x[None])) for x in ends]
    best = min(range(len(ends)), key=lambda i: (math.isnan(heights[i]), heights[i]))
    x = ends[best]
    return Fit(
        theta=objective.theta(x).detach(),
        covariance=covariance(objective, x),
        loglik=-heights[best] * objective.count,
        found=[-height * objective.count for height in heights],
        gradient=float(objective.gradient(x).abs().max()),
    )


def _descend(objective: Objective, start: Tensor, max_iter: int) -> Tensor:
    x = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [x],
        max_iter=max_iter,
        tolerance_grad=1e-7,
        tolerance_change=1e-11,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        optimiser.zero_grad()
        height = objective(x[None]).sum()
        height.backward()  # type: ignore[no-untyped-call]
        return float(height.detach())

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return x.detach()


def covariance(objective: Objective, x: Tensor) -> Tensor:
    """Covariance of the estimates at a maximum, ``[K, K]``, by the inverse of the information.

    Rows of parameters that the data does not determine (a variance that is 0) are NaN; the others
    are those of the model without them.
    """
    K = len(x)
    steps = _STEP * torch.eye(K, dtype=x.dtype)
    rows = [objective.gradient(x + h) - objective.gradient(x - h) for h in steps]
    information = torch.stack(rows) * (objective.count / (2.0 * _STEP))
    information = 0.5 * (information + information.T)
    at = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective.theta(at).sum(), at)  # links act one by one
    found = torch.full((K, K), math.nan, dtype=x.dtype)
    sure = torch.diagonal(information) > _FLAT
    inner = information[sure][:, sure]
    if len(inner) and bool((torch.linalg.eigvalsh(inner) > 0).all()):
        where = torch.where(sure)[0]
        found[where[:, None], where] = torch.linalg.inv(inner)
    return found * slope[:, None] * slope


def usual_sizes(v: Tensor, seen: Tensor, dt: Tensor) -> Scales:
    """Variance of the values that are there, median gap and longest span."""
    spread = v[seen].var(correction=0).item() if int(seen.sum()) > 1 else 1.0
    gaps = dt[dt > 0]
    gap = gaps.median().item() if len(gaps) else 1.0
    span = max(dt.sum(1).max().item(), gap)
    return Scales(variance=spread or 1.0, gap=gap, span=max(span, 2.0 * gap))


def names(structure: Structure) -> Sequence[str]:
    """Names of all parameters, in order."""
    return [parameter.name for parameter in structure.parameters]
