"""``StateSpace``: a model of series that can be fitted, applied and sampled from."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kalman_attention.series import fitting
from kalman_attention.series.components import Component, labels, parse
from kalman_attention.series.data import Panel, read_panel, read_stamps
from kalman_attention.series.filters import Structure
from kalman_attention.series.fitting import Standard
from kalman_attention.series.results import FittedSeries

Array = NDArray[np.float64]


class StateSpace:
    """A linear-Gaussian state-space model: a sum of latent processes, observed with noise.

    >>> from kalman_attention.series import StateSpace
    >>> results = StateSpace("level").fit([1.0, 2.0, float("nan"), 1.5, 2.5, 2.0])
    >>> bands = results.forecast(3).conf_int()

    Args:
        components: a formula such as ``"level + cycle"``, or a list of components.
        intercept: whether to fit a constant; by default only if no component has a level.
    """

    def __init__(
        self, components: str | Component | Sequence[Component], *, intercept: bool | None = None
    ) -> None:
        found = tuple(parse(components))
        floating = not any(component.diffuse for component in found)
        if intercept and not floating:
            raise ValueError(
                f"an intercept and {' + '.join(labels(found))} are the same constant twice: the "
                "start of a level or a trend is free. Leave intercept out."
            )
        constant = floating if intercept is None else intercept
        self.structure = Structure(components=found, intercept=constant)

    def __repr__(self) -> str:
        return f"StateSpace({' + '.join(labels(self.structure.components))!r})"

    @property
    def param_names(self) -> list[str]:
        """Names of the fitted parameters."""
        return [parameter.name for parameter in self.structure.parameters]

    def fit(
        self,
        y: Any,
        times: Any = None,
        *,
        time_unit: Any = "D",
        starts: int = 4,
        max_iter: int = 200,
    ) -> FittedSeries:
        """Fit by maximum likelihood; many series share one set of parameters.

        Args:
            y: ``[T]``, or ``[T, D]`` for D series with the same stamps, as array, tensor or pandas;
                or a list of series of different lengths. NaN for missing values.
            times: stamps ``[T]`` (a list of them for a list of series), numbers or dates, sorted,
                with any spacing; by default the index of pandas, or 0, 1, 2 ... Equal stamps are
                observations of one instant.
            time_unit: the unit of time if stamps are dates: "s", "h", "D" or a timedelta.
            starts: number of starting points for maximising the likelihood.
            max_iter: maximum number of steps from each.
        """
        panel = self._read(y, times, time_unit)
        least = len(self.param_names) + self.structure.diffuse * len(panel.stamps)
        if panel.nobs < least:
            raise ValueError(
                f"{panel.nobs} values cannot determine {self}: it has {len(self.param_names)} "
                f"parameters and {self.structure.diffuse} diffuse starts for each series, so it "
                f"needs at least {least}."
            )
        standard = Standard.of(self.structure, panel)
        if standard.constant:
            raise ValueError(
                "the series is constant: every variance would be 0 and the likelihood infinite. "
                "There is nothing to fit; use apply(y, params) with given parameters."
            )
        objective = fitting.Objective(self.structure, standard.values(panel), standard.scales)
        self._check_start(panel, standard, objective.theta(objective.starts(1)))
        found = fitting.fit(objective, starts, max_iter)
        return FittedSeries(self, panel, standard, found.theta, found)

    def apply(
        self, y: Any, params: Mapping[str, float], times: Any = None, *, time_unit: Any = "D"
    ) -> FittedSeries:
        """Apply the model with given parameters to a series.

        Args:
            y: as for ``fit``; one value is enough.
            params: a value for each of ``param_names``.
            times: as for ``fit``.
            time_unit: as for ``fit``.
        """
        panel = self._read(y, times, time_unit)
        standard = Standard.of(self.structure, panel)
        theta = standard.inwards(self.structure, self._ordered(params))
        self._check_start(panel, standard, theta[None])
        return FittedSeries(self, panel, standard, theta, None)

    def log_likelihood(
        self, y: Any, params: Mapping[str, float], times: Any = None, *, time_unit: Any = "D"
    ) -> float:
        """Log-likelihood of a series under given parameters; see ``apply``."""
        return self.apply(y, params, times, time_unit=time_unit).llf

    def simulate(
        self,
        params: Mapping[str, float],
        times: Any,
        *,
        num_samples: int = 1,
        seed: int = 0,
        time_unit: Any = "D",
    ) -> Array:
        """Draw series from the model, ``[num_samples, T]``; diffuse latents start at 0.

        Args:
            params: a value for each of ``param_names``.
            times: stamps, or their number.
            num_samples: number of series.
            seed: random seed.
            time_unit: as for ``fit``.
        """
        stamps = read_stamps(np.arange(times) if isinstance(times, int) else times, time_unit)
        dt = torch.from_numpy(np.diff(stamps.elapsed(), prepend=0.0))
        self.check_gaps(dt[None])
        theta = torch.from_numpy(self._ordered(params))
        generator = torch.Generator().manual_seed(seed)
        signal, noise = self.structure.draw(theta, dt, num_samples, generator)
        constant = theta[-1] if self.structure.intercept else 0.0
        found: Array = (signal + noise + constant).numpy()
        return found

    def _read(self, y: Any, times: Any, time_unit: Any) -> Panel:
        panel = read_panel(y, times, time_unit)
        self.check_gaps(panel.dt)
        return panel

    def check_gaps(self, dt: Tensor) -> None:
        """Raise if a component is not defined over these gaps."""
        for component in self.structure.components:
            component.check(dt)

    def _check_start(self, panel: Panel, standard: Standard, theta: Tensor) -> None:
        """Raise if the values do not determine the start of diffuse latents."""
        if self.structure.diffuse < 2:
            return
        bound = self.structure.bind(theta, standard.values(panel), standard.scales.gap)
        with torch.no_grad():
            known = bound.smoothed().variance.isfinite().all()
        if not known:
            raise ValueError(
                f"the values do not determine where {self} starts: each of its "
                f"{self.structure.diffuse} diffuse latents needs a value at a different time, and "
                "two levels (or a level and a trend) cannot be distinguished."
            )

    def _ordered(self, params: Mapping[str, float]) -> Array:
        missing = [name for name in self.param_names if name not in params]
        unknown = [name for name in params if name not in self.param_names]
        if missing or unknown:
            raise ValueError(
                f"params must have {', '.join(self.param_names)}; missing: {missing}, "
                f"unknown: {unknown}."
            )
        values = np.array([float(params[name]) for name in self.param_names])
        for parameter, value in zip(self.structure.parameters, values, strict=True):
            parameter.check(float(value))
        return values
