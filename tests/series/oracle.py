"""What is true of a series, by the covariance of its values: nothing here knows about filtering.

Each component has a covariance between any two times; a diffuse start is a regression on functions
of time with a flat prior. Beliefs follow by dense conditioning, the likelihood by the textbook
formula for that regression.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Params = dict[str, float]


def kernel(name: str, params: Params, s: Array, t: Array) -> Array:
    """Covariance of a component between times s and t, counted from the first stamp."""
    gap, first = np.abs(s[:, None] - t), np.minimum(s[:, None], t)
    if name == "level":
        return params["sigma2.level"] * first
    if name == "trend":
        slope = params["sigma2.slope"] * (first**3 / 3 + gap * first**2 / 2)
        return slope + params.get("sigma2.trend", 0.0) * first
    if name == "ou":
        rate = params["rate.ou"]
        return params["sigma2.ou"] / (2 * rate) * np.exp(-rate * gap)
    if name == "cycle":
        rate = params["rate.cycle"]
        turn = np.cos(2 * math.pi * gap / params["period.cycle"])
        return params["sigma2.cycle"] / (2 * rate) * np.exp(-rate * gap) * turn
    assert name == "ar"
    phi = params["ar.L1"]
    return params["sigma2.ar"] / (1 - phi**2) * np.power(phi, np.round(gap))


def design(names: list[str], t: Array) -> Array:
    """Functions of time that diffuse starts add to a series."""
    columns = []
    for name in names:
        columns += {"level": [t**0], "trend": [t**0, t]}.get(name, [])
    return np.stack(columns, 1) if columns else np.zeros((len(t), 0))


class Belief(NamedTuple):
    mean: Array
    covariance: Array

    @property
    def variance(self) -> Array:
        return np.diag(self.covariance)


class Oracle:
    """A sum of components at times t (from 0), with values where y is not NaN."""

    def __init__(self, names: list[str], params: Params, t: Array, y: Array) -> None:
        seen = ~np.isnan(y)
        self.names, self.params = names, params
        self.t, self.y = t[seen], y[seen] - params.get("intercept", 0.0)
        noise = params["sigma2.irregular"] * np.eye(len(self.t))
        self.K = self._cov(names, self.t, self.t) + noise
        self.X = design(names, self.t)

    def _cov(self, names: list[str], s: Array, t: Array) -> Array:
        return sum((kernel(name, self.params, s, t) for name in names), np.zeros((len(s), len(t))))

    def log_likelihood(self) -> float:
        inverse, X, y = np.linalg.inv(self.K), self.X, self.y
        W, eta = X.T @ inverse @ X, X.T @ inverse @ y
        quadratic = y @ inverse @ y - eta @ np.linalg.solve(W, eta) if X.size else y @ inverse @ y
        logs = np.linalg.slogdet(self.K)[1] + (np.linalg.slogdet(W)[1] if X.size else 0.0)
        return float(-0.5 * (len(y) * math.log(2 * math.pi) + logs + quadratic))

    def condition(self, at: Array, names: list[str] | None = None) -> Belief:
        """The signal, or a part of it, at other times given the values."""
        part = self.names if names is None else names
        inverse, X = np.linalg.inv(self.K), self.X
        cross = self._cov(part, at, self.t) @ inverse
        mean = cross @ self.y
        covariance = self._cov(part, at, at) - cross @ self._cov(part, self.t, at)
        if X.size:
            left = self._design(part, at) - cross @ X
            W = np.linalg.inv(X.T @ inverse @ X)
            mean = mean + left @ W @ X.T @ inverse @ self.y
            covariance = covariance + left @ W @ left.T
        constant = self.params.get("intercept", 0.0) if names is None else 0.0
        return Belief(mean + constant, covariance)

    def _design(self, part: list[str], at: Array) -> Array:
        """What diffuse starts add at other times; those of other components add nothing."""
        columns = [design([name], at) * float(name in part) for name in self.names]
        return np.concatenate(columns, 1)
