"""``FittedSeries``: a fitted model with estimates, forecasts, samples and a summary.

The names are those that users of statsmodels know: ``params``, ``bse``, ``llf``, ``aic``, ``bic``,
``fittedvalues``, ``resid``, ``summary()``, ``predict``, ``forecast``, ``conf_int``.
"""

import functools
import math
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kalman_attention.series.components import labels
from kalman_attention.series.data import Panel, Stamps, read_stamps
from kalman_attention.series.estimate import Estimate, labelled
from kalman_attention.series.filters import Filter, Reading
from kalman_attention.series.fitting import Fit, Standard

if TYPE_CHECKING:
    from kalman_attention.series.model import StateSpace

Array = NDArray[np.float64]


class FittedSeries:
    """A model with its parameters, and the series that it was fitted to.

    Attributes:
        model: the model.
        panel: the series.
    """

    def __init__(
        self,
        model: "StateSpace",
        panel: Panel,
        standard: Standard,
        theta: Tensor,
        found: Fit | None,
    ) -> None:
        self.model, self.panel = model, panel
        self._standard, self._theta, self._found = standard, theta, found

    def __len__(self) -> int:
        return len(self.panel.stamps)

    def __getitem__(self, which: Hashable) -> "FittedSeries":
        """One of several series, by number or by name, with the shared parameters."""
        names = list(self.panel.names)
        i = names.index(which) if which in names else which
        if not isinstance(i, int) or not -len(names) <= i < len(names):
            raise IndexError(f"there is no series {which!r}; the series are {names}.")
        i %= len(names)
        standard = replace(self._standard, centre=self._standard.centre[i : i + 1])
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

    @functools.cached_property
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
        """Number of parameters and of diffuse starts."""
        return len(self._theta) + self.model.structure.diffuse * len(self)

    @property
    def aic(self) -> float:
        """Akaike's criterion."""
        return 2.0 * self.df_model - 2.0 * self.llf

    @property
    def bic(self) -> float:
        """Bayesian information criterion, counting the values that are not missing."""
        return self.df_model * math.log(self.nobs) - 2.0 * self.llf

    @property
    def converged(self) -> bool:
        """Whether the gradient vanishes at the maximum of the likelihood."""
        return self._found is not None and self._found.gradient < 1e-5

    @property
    def climbs(self) -> list[float]:
        """How far below the highest log-likelihood each start ended; empty if not fitted."""
        found = [] if self._found is None else self._found.found
        return [height - max(found) for height in found]

    def log_likelihood(self, y: Any, times: Any = None, *, time_unit: Any = "D") -> float:
        """Log-likelihood of other data under these parameters, such as a held-out year."""
        return self.model.log_likelihood(y, self.params, times, time_unit=time_unit)

    @property
    def fittedvalues(self) -> Any:
        """Expectation of each value given those before it, of the same type as the data."""
        return self._back(self._read(self._bind(self.panel).predicted()).mean)

    @property
    def resid(self) -> Any:
        """Values minus ``fittedvalues``; NaN where there is no value, or no expectation yet."""
        v = torch.where(self.panel.seen, self.panel.v, math.nan)
        return self._back(v - self._read(self._bind(self.panel).predicted()).mean)

    def filter(self) -> Estimate:
        """The signal at each stamp given the values up to it."""
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
            time_unit: as for ``fit``.
        """
        if times is None:
            return self._estimate(self._bind(self.panel).smoothed(), noisy=True)
        return self._at(read_stamps(times, time_unit))

    def forecast(self, horizon: Any = 1, *, time_unit: Any = "D") -> Estimate:
        """Observations after the last stamp.

        Args:
            horizon: number of steps of the typical gap (or of the frequency of a pandas index), or
                stamps that are not before the last one.
            time_unit: as for ``fit``.
        """
        stamps = self._single("forecast").stamps[0]
        if isinstance(horizon, int | np.integer):
            if horizon < 1:
                raise ValueError(f"horizon is {horizon}: pass at least one step.")
            return self._at(stamps.later(int(horizon)))
        wanted = read_stamps(horizon, time_unit)
        if len(wanted) and wanted.elapsed(stamps.labels[-1])[0] < 0:
            raise ValueError(
                f"cannot forecast {wanted.labels[0]}, because the series ends at "
                f"{stamps.labels[-1]}: use predict(times) for times before the end."
            )
        return self._at(wanted)

    def sample(
        self, num_samples: int = 1, times: Any = None, *, seed: int = 0, time_unit: Any = "D"
    ) -> Array:
        """Sample paths of observations given all values, ``[num_samples, T]``, as for imputation.

        Uses Durbin and Koopman's simulation smoother: a path of the model, plus the smoothed
        difference between the series and that path.

        Args:
            num_samples: number of paths.
            times: stamps; by default those of the series.
            seed: random seed.
            time_unit: as for ``fit``.
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
        """Confidence intervals of the parameters, from their standard errors.

        Args:
            alpha: one minus the level.
        """
        z = Estimate.quantile(1.0 - 0.5 * alpha)
        return {
            name: (self.params[name] - z * se, self.params[name] + z * se)
            for name, se in self.bse.items()
        }

    def summary(self) -> str:
        """A summary of the fit, as text."""
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
            axes: matplotlib axes to draw into; by default a new figure is created.

        Returns:
            The figure.
        """
        try:
            from kalman_attention.plots.beliefs import plot_bands
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"plot() needs matplotlib ({error}): pip install 'kalman_attention[plot]'"
            ) from error
        panel = self._single("plot")
        continuous = all(component.continuous for component in self.model.structure.components)
        # Extra stamps in between: between distant stamps the bands widen, which a straight line
        # from one to the next would not show.
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
            raise ValueError(
                f"there is no component {component!r}; the components are {', '.join(names)}."
            )
        return names.index(component)

    def _at(self, stamps: Stamps) -> Estimate:
        merged, at = self._single("predict").at(stamps)
        self.model.check_gaps(merged.dt)
        found = self._read(self._bind(merged).smoothed(), noisy=True)
        mean, variance = (x[0, at].numpy() for x in found)
        return Estimate(stamps, mean, variance)

    def _estimate(
        self, found: Reading, *, only: int | None = None, noisy: bool = False
    ) -> Estimate:
        if self.panel.shape == "rows":
            raise ValueError("the series have different stamps: call results[i] for one of them.")
        found = self._read(found, only=only, noisy=noisy)
        one = self.panel.shape == "one"
        mean, variance = ((x[0] if one else x.T).numpy() for x in found)
        return Estimate(
            self.panel.stamps[0], mean, variance, names=None if one else self.panel.names
        )

    def _read(self, found: Reading, *, only: int | None = None, noisy: bool = False) -> Reading:
        """Convert to the units of the user, adding what was subtracted from the data."""
        scale, structure = self._standard.scale, self.model.structure
        mean = found.mean.squeeze(-1) if found.mean.dim() > 2 else found.mean
        centre, constant = self._standard.centre[:, None], torch.zeros(())
        if structure.intercept:
            constant = self._theta[-1]
        if only is not None:
            # A series varies around its first level or trend; the others vary around 0.
            diffuse = [component.diffuse for component in structure.components]
            home = only == diffuse.index(True) if any(diffuse) else False
            centre, constant = centre if home else torch.zeros(()), torch.zeros(())
        noise = self._theta[0] if noisy else 0.0
        mean = scale * (mean + constant) + centre
        return Reading(mean.detach(), (scale * scale * (found.variance + noise)).detach())

    def _named(self, values: Array) -> dict[str, float]:
        return dict(zip(self.model.param_names, map(float, values), strict=True))

    def _back(self, rows: Tensor) -> Any:
        """Numbers ``[B, T]`` of the same type as the data: array or pandas."""
        if self.panel.shape == "rows":
            raise ValueError("the series have different stamps: call results[i] for one of them.")
        one = self.panel.shape == "one"
        values = (rows[0] if one else rows.T).detach().numpy()
        return labelled(values, self.panel.stamps[0], None if one else self.panel.names)
