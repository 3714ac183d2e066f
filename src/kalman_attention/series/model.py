"""``StateSpace``, a model of series that is fitted and drawn from, and ``FittedSeries``, a fit.

The names are those that users of statsmodels know: ``params``, ``bse``, ``llf``, ``aic``, ``bic``,
``fittedvalues``, ``resid``, ``summary()``, ``predict``, ``forecast``, ``conf_int``.
"""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kalman_attention.series import fitting
from kalman_attention.series.components import Component, Scales, labels, parse
from kalman_attention.series.data import Panel, Stamps, read_panel, read_stamps
from kalman_attention.series.estimate import Estimate, labelled
from kalman_attention.series.filters import Filter, Reading, Structure, Values

Array = NDArray[np.float64]


class StateSpace:
    """A linear-Gaussian state-space model: a sum of latent processes, seen with noise.

    >>> from kalman_attention.series import StateSpace
    >>> results = StateSpace("level").fit([1.0, 2.0, float("nan"), 1.5, 2.5, 2.0])
    >>> bands = results.forecast(3).conf_int()

    Args:
        components: a formula such as ``"level + cycle"``, or components to add up.
        intercept: whether to fit a constant; by default where no component has a level.
    """

    def __init__(
        self, components: str | Component | Sequence[Component], *, intercept: bool | None = None
    ) -> None:
        found = tuple(parse(components))
        floating = not any(component.diffuse for component in found)
        if intercept and not floating:
            raise ValueError(
                f"an intercept and {' + '.join(labels(found))} are one constant twice: a level or "
                "a trend starts anywhere. Leave intercept out."
            )
        constant = floating if intercept is None else intercept
        self.structure = Structure(components=found, intercept=constant)

    def __repr__(self) -> str:
        return f"StateSpace({' + '.join(labels(self.structure.components))!r})"

    @property
    def param_names(self) -> list[str]:
        """Names of what is fitted."""
        return list(fitting.names(self.structure))

    def fit(
        self,
        y: Any,
        times: Any = None,
        *,
        time_unit: Any = "D",
        starts: int = 4,
        max_iter: int = 200,
    ) -> "FittedSeries":
        """Fit by maximum likelihood; many series share one set of parameters.

        Args:
            y: ``[T]``, or ``[T, D]`` for D series on the same stamps, as array, tensor or pandas;
                or a list of series of their own lengths. NaN where nothing was seen.
            times: stamps ``[T]`` (a list of them for a list of series), numbers or dates, sorted,
                in any spacing; by default the index of pandas, or 0, 1, 2 ... Equal stamps are
                observations of one instant.
            time_unit: one unit of time where stamps are dates: "s", "h", "D" or a timedelta.
            starts: from how many points to climb the likelihood.
            max_iter: the most steps from each.
        """
        panel = self._read(y, times, time_unit)
        least = len(self.param_names) + self.structure.diffuse * len(panel.stamps)
        if panel.nobs < least:
            raise ValueError(
                f"{panel.nobs} values cannot determine {self}: it has {len(self.param_names)} "
                f"parameters and {self.structure.diffuse} unknown starts for each series, so it "
                f"needs at least {least}."
            )
        standard = Standard.of(self.structure, panel)
        if standard.constant:
            raise ValueError(
                "the series is constant: every variance would be 0 and the likelihood infinite. "
                "There is nothing to fit; apply(y, params) takes parameters of your own."
            )
        objective = fitting.Objective(self.structure, standard.values(panel), standard.scales)
        self._check_start(panel, standard, objective.theta(objective.starts(1)))
        found = fitting.fit(objective, starts, max_iter)
        return FittedSeries(self, panel, standard, found.theta, found)

    def apply(
        self, y: Any, params: Mapping[str, float], times: Any = None, *, time_unit: Any = "D"
    ) -> "FittedSeries":
        """The model with parameters of your own, on a series.

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
        """Log-likelihood of a series under parameters of your own; see ``apply``."""
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
            num_samples: how many series.
            seed: of the random numbers.
            time_unit: as for ``fit``.
        """
        stamps = read_stamps(np.arange(times) if isinstance(times, int) else times, time_unit)
        dt = torch.from_numpy(np.diff(stamps.elapsed(), prepend=0.0))
        self._check_gaps(dt[None])
        theta = torch.from_numpy(self._ordered(params))
        generator = torch.Generator().manual_seed(seed)
        signal, noise = self.structure.draw(theta, dt, num_samples, generator)
        constant = theta[-1] if self.structure.intercept else 0.0
        found: Array = (signal + noise + constant).numpy()
        return found

    def _read(self, y: Any, times: Any, time_unit: Any) -> Panel:
        panel = read_panel(y, times, time_unit)
        self._check_gaps(panel.dt)
        return panel

    def _check_gaps(self, dt: Tensor) -> None:
        for component in self.structure.components:
            component.check(dt)

    def _check_start(self, panel: Panel, standard: "Standard", theta: Tensor) -> None:
        """Raise if the values do not say where diffuse latents started."""
        if self.structure.diffuse < 2:
            return
        bound = self.structure.bind(theta, standard.values(panel), standard.scales.gap)
        with torch.no_grad():
            known = bound.smoothed().variance.isfinite().all()
        if not known:
            raise ValueError(
                f"the values do not determine where {self} starts: each of its "
                f"{self.structure.diffuse} diffuse latents needs a value at a time of its own, and "
                "two levels (or a level and a trend) cannot be told apart."
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
        return cls(centre, scale, fitting.usual_sizes(rest / scale, seen, panel.dt), constant)

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


class FittedSeries:
    """A model with its parameters, on the series that it was fitted to.

    Attributes:
        model: what was fitted.
        panel: the series.
    """

    def __init__(
        self,
        model: StateSpace,
        panel: Panel,
        standard: Standard,
        theta: Tensor,
        found: fitting.Fit | None,
    ) -> None:
        self.model, self.panel = model, panel
        self._standard, self._theta, self._found = standard, theta, found

    def __len__(self) -> int:
        return len(self.panel.stamps)

    def __getitem__(self, which: Hashable) -> "FittedSeries":
        """One of many series, by number or by name, with the parameters of all."""
        names = list(self.panel.names)
        i = names.index(which) if which in names else which
        if not isinstance(i, int) or not -len(names) <= i < len(names):
            raise IndexError(f"there is no series {which!r}; there are {names}.")
        i %= len(names)
        standard = Standard(
            self._standard.centre[i : i + 1],
            self._standard.scale,
            self._standard.scales,
            self._standard.constant,
        )
        return FittedSeries(self.model, self.panel.row(i), standard, self._theta, self._found)

    def __iter__(self) -> Iterator["FittedSeries"]:
        return (self[i] for i in range(len(self)))

    @property
    def params(self) -> dict[str, float]:
        """Parameters by name, in the units of the data."""
        return self._named(self._standard.outwards(self.model.structure, self._theta))

    @property
    def cov_params(self) -> Array:
        """Covariance of the estimates, ``[K, K]``; NaN where the data does not determine one."""
        if self._found is None:
            raise ValueError(
                "these parameters were given, not fitted: they have no standard errors."
            )
        units = self._standard.units(self.model.structure)
        found: Array = self._found.covariance.numpy() * units[:, None] * units
        return found

    @property
    def bse(self) -> dict[str, float]:
        """Standard errors of the parameters, from the observed information."""
        return self._named(np.sqrt(np.diag(self.cov_params)))

    @property
    def llf(self) -> float:
        """Log-likelihood; with diffuse latents the exact diffuse one, as in statsmodels."""
        with torch.no_grad():
            inner = float(self._bind(self.panel).log_likelihood().sum())
        spent = self.model.structure.diffuse * len(self)
        return inner - (self.nobs - spent) * math.log(self._standard.scale)

    @property
    def nobs(self) -> int:
        """Number of values that are not missing."""
        return self.panel.nobs

    @property
    def df_model(self) -> int:
        """Parameters, and starts of diffuse latents."""
        return len(self._theta) + self.model.structure.diffuse * len(self)

    @property
    def aic(self) -> float:
        """Akaike's criterion."""
        return 2.0 * self.df_model - 2.0 * self.llf

    @property
    def bic(self) -> float:
        """Schwarz's criterion, with the values that are not missing."""
        return self.df_model * math.log(self.nobs) - 2.0 * self.llf

    @property
    def converged(self) -> bool:
        """Whether the gradient vanished where the likelihood was largest."""
        return self._found is not None and self._found.gradient < 1e-5

    @property
    def found(self) -> list[float]:
        """Log-likelihoods that the starts led to, in scaled units, for looking at differences."""
        return [] if self._found is None else self._found.found

    def log_likelihood(self, y: Any, times: Any = None, *, time_unit: Any = "D") -> float:
        """Log-likelihood of other data under these parameters, such as a held-out year."""
        return self.model.log_likelihood(y, self.params, times, time_unit=time_unit)

    @property
    def fittedvalues(self) -> Any:
        """Expectation of each value given those before it, in the form of the data."""
        return self._back(self._read(self._bind(self.panel).predicted()).mean)

    @property
    def resid(self) -> Any:
        """Values minus ``fittedvalues``; NaN where there is none, or no expectation yet."""
        v = torch.where(self.panel.seen, self.panel.v, math.nan)
        return self._back(v - self._read(self._bind(self.panel).predicted()).mean)

    def filter(self) -> Estimate:
        """The signal after each value, from the values up to it."""
        return self._estimate(self._bind(self.panel).filtered())

    def smooth(self, component: str | None = None) -> Estimate:
        """The signal at each stamp given all values.

        Args:
            component: one of the components, such as ``"level"``, instead of their sum.
        """
        only = None if component is None else self._number(component)
        return self._estimate(self._bind(self.panel, only).smoothed(), only=only)

    def predict(self, times: Any = None, *, time_unit: Any = "D") -> Estimate:
        """A new observation at any time, given all values: interpolation, or a forecast.

        Args:
            times: stamps, sorted; by default those of the series.
            time_unit: of dates.
        """
        if times is None:
            return self._estimate(self._bind(self.panel).smoothed(), noisy=True)
        return self._at(read_stamps(times, time_unit))

    def forecast(self, horizon: Any = 1, *, time_unit: Any = "D") -> Estimate:
        """Observations after the last stamp.

        Args:
            horizon: number of steps of the usual gap (of the frequency of a pandas index), or
                stamps that are not before the last one.
            time_unit: of dates.
        """
        stamps = self._single("forecast").stamps[0]
        if isinstance(horizon, int | np.integer):
            if horizon < 1:
                raise ValueError(f"horizon is {horizon}: pass at least one step.")
            return self._at(stamps.later(int(horizon)))
        wanted = read_stamps(horizon, time_unit)
        if len(wanted) and wanted.elapsed(stamps.labels[-1])[0] < 0:
            raise ValueError(
                f"the series ends at {stamps.labels[-1]} and a forecast for {wanted.labels[0]} is "
                "asked for: predict(times) serves times before the end."
            )
        return self._at(wanted)

    def sample(
        self, num_samples: int = 1, times: Any = None, *, seed: int = 0, time_unit: Any = "D"
    ) -> Array:
        """Paths of observations given all values, ``[num_samples, T]``: imputations that vary.

        By Durbin and Koopman's correction: a path of the model, plus what smoothing says of the
        difference between the series and the values of that path.

        Args:
            num_samples: how many paths.
            times: stamps; by default those of the series.
            seed: of the random numbers.
            time_unit: of dates.
        """
        panel, at = self._single("sample"), slice(None)
        if times is not None:
            panel, at = panel.at(read_stamps(times, time_unit))  # type: ignore[assignment]
        values, structure = self._standard.values(panel), self.model.structure
        generator = torch.Generator().manual_seed(seed)
        signal, noise = structure.draw(self._theta, panel.dt[0], num_samples, generator)
        apart = values._replace(v=values.v - (signal + noise).T[None])
        bound = structure.bind(self._theta[None], apart, self._standard.scales.gap)
        with torch.no_grad():
            path = signal + bound.smoothed().mean[0].T
        more = self._theta[0].sqrt() * torch.randn(path.shape, generator=generator).double()
        found: Array = self._read(Reading(path + more, path)).mean[:, at].numpy()
        return found

    def conf_int(self, alpha: float = 0.05) -> dict[str, tuple[float, float]]:
        """Intervals for the parameters, from their standard errors.

        Args:
            alpha: one minus the level.
        """
        z = Estimate.quantile(1.0 - 0.5 * alpha)
        return {
            name: (self.params[name] - z * se, self.params[name] + z * se)
            for name, se in self.bse.items()
        }

    def summary(self) -> str:
        """What was fitted, as text."""
        series = f"{len(self)} series, " if len(self) > 1 else ""
        lines = [
            f"{' + '.join(labels(self.model.structure.components))}: {series}{self.nobs} values",
            f"log-likelihood {self.llf:.4f}   AIC {self.aic:.2f}   BIC {self.bic:.2f}",
            "",
            f"{'':20}{'estimate':>14}{'std err':>14}{'[0.025':>14}{'0.975]':>14}",
        ]
        errors = self.bse if self._found is not None else {}
        bounds = self.conf_int() if self._found is not None else {}
        for name, value in self.params.items():
            numbers = [value, *([errors[name], *bounds[name]] if errors else [])]
            lines.append(f"{name:20}" + "".join(f"{number:>14.6g}" for number in numbers))
        if any(math.isnan(error) for error in errors.values()):
            lines += ["", "nan: the data does not determine the parameter (a variance near 0)."]
        return "\n".join(lines)

    def plot(self, *, horizon: int = 0, alpha: float = 0.05, axes: Any = None) -> Any:
        """Values, the smoothed signal, and bands for observations; needs matplotlib.

        Args:
            horizon: steps of forecast to draw after the end.
            alpha: one minus the level of the bands.
            axes: of matplotlib, to draw into; by default a figure is made.

        Returns:
            The figure.
        """
        try:
            from kalman_attention.plots.series import plot_bands
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"plot() needs matplotlib ({error}): pip install 'kalman_attention[plot]'"
            ) from error
        panel = self._single("plot")
        continuous = all(component.continuous for component in self.model.structure.components)
        # Between distant stamps bands are wider than a line from one to the next.
        whole = self._at(panel.stamps[0].filled(300)) if continuous else self.predict()
        parts = [whole, *([self.forecast(horizon)] if horizon else [])]
        seen = panel.seen[0].numpy()
        return plot_bands(
            panel.stamps[0].labels[seen],
            panel.v[0].numpy()[seen],
            [(part.times, part.mean, *part.bounds(alpha)) for part in parts],
            level=1.0 - alpha,
            axes=axes,
        )

    def _bind(self, panel: Panel, only: int | None = None) -> Filter:
        values, gap = self._standard.values(panel), self._standard.scales.gap
        return self.model.structure.bind(self._theta[None], values, gap, only)

    def _single(self, verb: str) -> Panel:
        if len(self) > 1:
            raise ValueError(f"there are {len(self)} series: call results[i].{verb}(...) for one.")
        return self.panel

    def _number(self, component: str) -> int:
        names = labels(self.model.structure.components)
        if component not in names:
            raise ValueError(f"there is no component {component!r}; there are {', '.join(names)}.")
        return names.index(component)

    def _at(self, stamps: Stamps) -> Estimate:
        merged, at = self._single("predict").at(stamps)
        self.model._check_gaps(merged.dt)
        found = self._read(self._bind(merged).smoothed(), noisy=True)
        mean, variance = (x[0, at].numpy() for x in found)
        return Estimate(stamps, mean, variance)

    def _estimate(
        self, found: Reading, *, only: int | None = None, noisy: bool = False
    ) -> Estimate:
        if self.panel.shape == "rows":
            raise ValueError("series with stamps of their own: call results[i] for one of them.")
        found = self._read(found, only=only, noisy=noisy)
        one = self.panel.shape == "one"
        mean, variance = ((x[0] if one else x.T).numpy() for x in found)
        return Estimate(
            self.panel.stamps[0], mean, variance, names=None if one else self.panel.names
        )

    def _read(self, found: Reading, *, only: int | None = None, noisy: bool = False) -> Reading:
        """In the units of the user, with what was subtracted from the data."""
        scale, structure = self._standard.scale, self.model.structure
        mean = found.mean.squeeze(-1) if found.mean.dim() > 2 else found.mean
        centre, constant = self._standard.centre[:, None], torch.zeros(())
        if structure.intercept:
            constant = self._theta[-1]
        if only is not None:
            # The first level or trend is what a series varies about; the others vary about 0.
            diffuse = [component.diffuse for component in structure.components]
            home = only == diffuse.index(True) if any(diffuse) else False
            centre, constant = centre if home else torch.zeros(()), torch.zeros(())
        noise = self._theta[0] if noisy else 0.0
        mean = scale * (mean + constant) + centre
        return Reading(mean.detach(), (scale * scale * (found.variance + noise)).detach())

    def _named(self, values: Array) -> dict[str, float]:
        return dict(zip(self.model.param_names, map(float, values), strict=True))

    def _back(self, rows: Tensor) -> Any:
        """Numbers ``[B, T]`` in the form of the data: array or pandas."""
        if self.panel.shape == "rows":
            raise ValueError("series with stamps of their own: call results[i] for one of them.")
        one = self.panel.shape == "one"
        values = (rows[0] if one else rows.T).detach().numpy()
        return labelled(values, self.panel.stamps[0], None if one else self.panel.names)
