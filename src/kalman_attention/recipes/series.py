"""``series``: classical state-space models on the Nile, on sunspots and on a drive with GPS gaps.

The Nile reproduces variances that are printed in textbooks. In the other two a part is hidden:
single years of the sunspots, stretches of seconds of the drive. A model is good if its bands are
narrow and contain as many hidden values as they promise. Models are compared on different hidden
sets (seeds from 100 on) from those on which the chosen model is reported.
"""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kalman_attention import published
from kalman_attention._extras import library
from kalman_attention._files import sha256
from kalman_attention._tables import Table, percent
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, notes
from kalman_attention.series import NILE, NILE_YEARS, OU, Component, Cycle, Level, StateSpace, Trend

Array = NDArray[np.float64]

FILES = {"sunspots": "sunspots.csv", "car": "2014-03-26-000-Data.csv"}
"""Files that are read from the folder of ``--data``, or from a folder in it."""

_SUN = Cycle(period=(8.0, 14.0))
MODELS: dict[str, dict[str, Sequence[Component]]] = {
    "nile": {"level": [Level()]},
    "sunspots": {
        "root, level": [Level()],
        "root, ou": [OU()],
        "cycle": [_SUN],
        "root, cycle": [_SUN],
        "root, level + cycle": [Level(), _SUN],
        "root, ou + cycle": [OU(), _SUN],
    },
    "car": {
        "level": [Level()],
        "smooth trend": [Trend(smooth=True)],
        "trend": [Trend()],
    },
}
"""Models of each series; those with ``root`` model the square root of the values."""

CHOSEN = {"nile": "level", "sunspots": "root, level + cycle", "car": "trend"}
"""The model of each series with the lowest CRPS on the hidden sets of the trial seeds."""

_DRAWS = 500  # posterior samples for CRPS and RMSE
_EARTH = 111_320.0  # metres in a degree of latitude


class Measured(NamedTuple):
    """A series with hidden values: times ``[T]``, values ``[T, D]``, hidden ``[T]``."""

    times: Array
    values: Array
    hidden: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class SeriesRun:
    """One fit as a cell.

    Attributes:
        series: ``nile``, ``sunspots`` or ``car``.
        model: one of ``MODELS``.
        seed: seed of the choice of hidden values.
        starts: number of starting points for maximising the likelihood.
        max_iter: maximum number of steps.
        every: use only every n-th position of the drive, for tests.
        data: folder with ``FILES``; its path is not part of the configuration.
    """

    series: str
    model: str
    seed: int = 0
    starts: int = 4
    max_iter: int = 200
    every: int = 1
    data: str = field(default="", metadata={"place": True})

    @property
    def updates(self) -> int:
        """Number of steps of the fit."""
        return self.max_iter

    def execute(self, folder: Path, *, show: bool) -> dict[str, Any]:
        """Fit, and score the hidden values; this takes seconds, so there are no checkpoints."""
        measured = self.measured()
        fitted = self.fit(measured)
        metrics = {name: float(value) for name, value in fitted.params.items()}
        metrics |= {f"error {name}": float(value) for name, value in fitted.bse.items()}
        metrics |= {"llf": fitted.llf, "aic": fitted.aic}
        if measured.hidden.any():
            metrics = self.score(measured, fitted) | metrics
        return {"metrics": metrics, "values": fitted.nobs, "data": self._checksum(), "curve": []}

    def measured(self) -> Measured:
        """The series, and which of its values are hidden."""
        if self.series == "nile":
            values = np.array(NILE, float)[:, None]
            return Measured(np.array(NILE_YEARS, float), values, np.zeros(len(values), bool))
        read: dict[str, Callable[[Path, SeriesRun], Measured]] = {
            "sunspots": _sunspots,
            "car": _car,
        }
        return read[self.series](self._path(), self)

    def fit(self, measured: Measured) -> Any:
        """Fit the model to the values that are not hidden."""
        seen = np.where(measured.hidden[:, None], math.nan, self._inwards(measured.values))
        model = StateSpace(MODELS[self.series][self.model])
        values = seen[:, 0] if seen.shape[1] == 1 else seen
        return model.fit(values, measured.times, starts=self.starts, max_iter=self.max_iter)

    def score(self, measured: Measured, fitted: Any) -> dict[str, float]:
        """Share of hidden values in 95 % bands, width of the bands, CRPS and error of the means."""
        rules, metrics = library("scoringrules", "series"), library("sklearn.metrics", "series")
        at = measured.hidden
        bands = [one.predict().bounds() for one in fitted]
        low, high = (self._outwards(np.stack([b[i][at] for b in bands], 1)) for i in (0, 1))
        draws = [one.sample(_DRAWS, seed=self.seed)[:, at].T for one in fitted]
        drawn, truth = self._outwards(np.stack(draws, 1)), measured.values[at]
        return {
            "coverage": float(((low <= truth) & (truth <= high)).mean()),
            "crps": float(rules.crps_ensemble(truth, drawn).mean()),
            "width": float((high - low).mean()),
            "rmse": float(metrics.root_mean_squared_error(truth, drawn.mean(-1))),
            "hidden": float(at.sum()),
        }

    def bands(self) -> tuple[NDArray[Any], ...]:
        """Times, values, which are hidden, and lower end, mean and upper end of the bands.

        If there are several series, the first one; for a model of the square root, the mean is
        squared and is then the median.
        """
        measured = self.measured()
        belief = self.fit(measured)[0].predict()
        low, high = belief.bounds()
        ends = (self._outwards(x) for x in (low, belief.mean, high))
        return measured.times, measured.values[:, 0], measured.hidden, *ends

    def _inwards(self, values: Array) -> Array:
        return np.sqrt(values) if self.model.startswith("root") else values

    def _outwards(self, values: Array) -> Array:
        """Undo the square root; negative roots become 0."""
        return np.clip(values, 0.0, None) ** 2 if self.model.startswith("root") else values

    def _path(self) -> Path:
        name = FILES[self.series]
        if not self.data:
            raise ValueError(f"this fit needs {name}: pass the folder that has it with --data.")
        folder = Path(self.data)
        found = [
            path for path in (folder / name, *sorted(folder.glob(f"*/{name}"))) if path.exists()
        ]
        if not found:
            raise ValueError(f"there is no {name} in {folder}, or in a folder in it.")
        return found[0]

    def _checksum(self) -> str | None:
        return None if self.series == "nile" else sha256(self._path())


def _sunspots(path: Path, run: SeriesRun) -> Measured:
    """Yearly sunspot numbers; a random third of the years is hidden."""
    years, numbers = _columns(path, ["YEAR", "SUNACTIVITY"])
    hidden = np.zeros(len(years), bool)
    hidden[np.random.default_rng(run.seed).permutation(len(years))[: len(years) // 3]] = True
    return Measured(years, numbers[:, None], hidden)


def _car(path: Path, run: SeriesRun) -> Measured:
    """Metres to the east and north, at each new position of the receiver, ten times a second.

    Sixteen stretches of one to five seconds are hidden, as in a tunnel.
    """
    clock, millis, latitude, longitude = _columns(path, ["time", "millis", "latitude", "longitude"])
    new = np.flatnonzero(np.diff(clock, prepend=-1.0))[:: run.every]
    t, north, east = (x[new] - x[new[0]] for x in (millis / 1000.0, latitude, longitude))
    east = east * math.cos(math.radians(latitude.mean()))
    random, hidden = np.random.default_rng(run.seed), np.zeros(len(t), bool)
    for begin, length in zip(
        random.uniform(5.0, t[-1] - 10.0, 16), random.uniform(1.0, 5.0, 16), strict=True
    ):
        hidden |= (t >= begin) & (t < begin + length)
    return Measured(t, _EARTH * np.stack([east, north], 1), hidden)


def _columns(path: Path, names: Sequence[str]) -> list[Array]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in names if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"{path} has no column {', '.join(missing)}, or no rows.")
    return [np.array([float(row[name]) for row in rows]) for name in names]


@dataclass(frozen=True, kw_only=True)
class SeriesScale:
    """Settings of the experiment at one scale.

    Attributes:
        seeds: seeds of the hidden sets on which the chosen models are reported.
        trial_seeds: seeds of the hidden sets on which models are compared.
        options: options of every run.
        changes: differences from the full experiment, for the table.
    """

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    trial_seeds: tuple[int, ...] = (100, 101, 102)
    options: dict[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()


SCALES: dict[Scale, SeriesScale] = {
    "smoke": SeriesScale(
        seeds=(0,),
        trial_seeds=(),
        options={"starts": 1, "max_iter": 5, "every": 20},
        changes=("five steps, one position in two seconds: only shows that it runs",),
    ),
    "cpu": SeriesScale(),
    "paper": SeriesScale(
        seeds=tuple(range(20)),
        trial_seeds=tuple(range(100, 110)),
        changes=("more hidden sets; not in the paper",),
    ),
}
"""The experiment at each scale."""


def cells(scale: Scale) -> list[Cell]:
    """The Nile once; the chosen model on the seeds, and all models on the trial seeds."""
    setting, found = SCALES[scale], []
    for series, models in MODELS.items():
        pairs = [(CHOSEN[series], seed) for seed in setting.seeds]
        pairs += [(model, seed) for model in models for seed in setting.trial_seeds]
        for model, seed in pairs[:1] if series == "nile" else pairs:
            labels = {"series": series, "model": model, "seed": f"seed{seed}"}
            run = SeriesRun(series=series, model=model, seed=seed, **setting.options)
            found.append(Cell(experiment="series", labels=labels, run=run))
    return found


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Parameters of the Nile, coverage of the chosen models, and the comparison of all models."""
    return [_nile_table(scale, results), _coverage_table(scale, results), _trials(scale, results)]


def _nile_table(scale: Scale, results: Sequence[dict[str, Any]]) -> Table:
    names = ("sigma2.irregular", "sigma2.level")
    rows = []
    for found in (r["metrics"] for r in results if r["labels"]["series"] == "nile"):
        rows.append(["estimate", *(f"{found[name]:,.1f}" for name in names), f"{found['llf']:.4f}"])
        rows.append(["standard error", *(f"{found[f'error {name}']:,.1f}" for name in names), ""])
    rows.append(["published (Durbin and Koopman)", *(f"{published.NILE[n]:,}" for n in names), ""])
    header = ["Nile, local level", "variance of noise", "of the level, per year", "log-likelihood"]
    how = "exact diffuse likelihood, every value counts log(2 pi) / 2"
    return Table("The flow of the Nile", header, rows, notes(scale, [how]))


def _coverage_table(scale: Scale, results: Sequence[dict[str, Any]]) -> Table:
    setting = SCALES[scale]
    seeds = [f"seed{seed}" for seed in setting.seeds]
    rows = []
    for series, model in list(CHOSEN.items())[1:]:
        found = [_result(results, series, model, seed) for seed in seeds]
        rows.append([series, model, *(_mean([x], "coverage") for x in found), *_scores(found)])
    header = ["series", "model", *(f"seed {s}" for s in setting.seeds), *_SCORES]
    title = "Hidden values in bands of 95 %, in percent"
    return Table(title, header, rows, notes(scale, [*setting.changes, *_UNITS]))


def _trials(scale: Scale, results: Sequence[dict[str, Any]]) -> Table:
    setting = SCALES[scale]
    seeds = [f"seed{seed}" for seed in setting.trial_seeds]
    rows = [
        [series, model, *_scores([_result(results, series, model, seed) for seed in seeds])]
        for series, models in list(MODELS.items())[1:]
        for model in models
    ]
    how = f"the lowest CRPS on seeds {', '.join(map(str, setting.trial_seeds))} was chosen"
    title = "All models, on other hidden sets"
    return Table(title, ["series", "model", *_SCORES], rows, notes(scale, [how, *_UNITS]))


_SCORES = ("mean coverage", "mean width", "CRPS", "RMSE", "log-likelihood")
_UNITS = (
    "sunspots: a third of 309 years hidden, scores in numbers of spots; root: a model of their "
    "square root, whose likelihood does not compare with the others",
    "car: 16 stretches of one to five seconds of 216 hidden, position to the east and north with "
    "the same parameters, scores in metres",
)


def _result(
    results: Sequence[dict[str, Any]], series: str, model: str, seed: str
) -> dict[str, Any] | None:
    labels = {"series": series, "model": model, "seed": seed}
    return next((r["metrics"] for r in results if r["labels"] == labels), None)


def _scores(found: Sequence[dict[str, Any] | None]) -> list[str]:
    names = ("coverage", "width", "crps", "rmse", "llf")
    return [_mean(found, name) for name in names]


def _mean(found: Sequence[dict[str, Any] | None], name: str) -> str:
    values = [metrics[name] for metrics in found if metrics is not None]
    if not values or len(values) < len(found):
        return "-"
    mean = sum(values) / len(values)
    return percent(mean) if name == "coverage" else f"{mean:,.{1 if name == 'llf' else 3}f}"


EXPERIMENT = Experiment(name="series", source=None, cells=cells, tables=tables, metric="crps")
