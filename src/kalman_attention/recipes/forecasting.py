"""``forecasting``: the next 96 hours of ETTh1 from the last 96, with a variance.

``hourly`` shows every hour, ``thinned`` a random half of the hours, where the time stamps matter.
The future is requested by instants without observations. The models are compared with a linear map
from the past of a channel to its future, fitted by least squares, and with persistence; the
variance of both is that of their training errors, for each hour ahead. The mean of a window is
subtracted for all, and errors are in standard deviations of the training set, as usual for this
dataset.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kalman_attention._tables import Table
from kalman_attention.data.measurements import read_table
from kalman_attention.evaluation.series import gaussian_scores
from kalman_attention.models.series_config import SeriesConfig
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, notes
from kalman_attention.recipes.series_run import Series, Splits, over_seeds, train_series
from kalman_attention.train.config import TrainConfig

Task = Literal["hourly", "thinned"]
FILE, CHANNELS, BATCH = "ETTh1.csv", 7, 50
MONTH = 30 * 24
MONTHS = (12, 4, 4)
"""Months for training, validation and test, in this order: the usual split."""

BASE = SeriesConfig(channels=CHANNELS, outputs=CHANNELS, num_layers=2, tell_gaps=True)
_GRU = dataclasses.replace(BASE, mixer="gru")
MODELS: dict[Task, dict[str, SeriesConfig]] = {
    "hourly": {"kla": BASE, "gru": _GRU},
    "thinned": {
        "kla": BASE,
        "kla without time": dataclasses.replace(BASE, use_time=False),
        "gru": _GRU,
    },
}
"""Models trained by gradient descent, by task."""

SIMPLE = ("linear", "persistence")
"""Models without gradient descent, on the hourly task."""


class Windows(NamedTuple):
    """Windows of past and future, minus the mean of the past.

    Attributes:
        past: ``[n, hours, 7]``.
        future: ``[n, ahead, 7]``.
    """

    past: Tensor
    future: Tensor


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Lengths and strides of the windows.

    Attributes:
        hours: number of past hours shown.
        ahead: number of hours to predict.
        stride: hours between the starts of windows for training and validation.
        test_stride: hours between the starts of test windows.
    """

    hours: int = 96
    ahead: int = 96
    stride: int = 8
    test_stride: int = 1


@functools.lru_cache(maxsize=1)  # shared by the cells of a process
def windows(data: str, setting: Setting) -> tuple[Windows, Windows, Windows]:
    """Windows for training, validation and test; a past may reach into the previous split."""
    if not data:
        raise ValueError(f"this experiment reads {FILE}: pass the folder that has it with --data.")
    rows = read_table(Path(data) / FILE).double()
    ends = [sum(MONTHS[: i + 1]) * MONTH for i in range(3)]
    if len(rows) < ends[-1]:
        raise ValueError(
            f"{FILE} has {len(rows)} rows, but 20 months of hours, {ends[-1]} rows, are needed."
        )
    train = rows[: ends[0]]
    rows = (rows - train.mean(0)) / train.std(0)
    strides = (setting.stride, setting.stride, setting.test_stride)
    starts = (0, ends[0] - setting.hours, ends[1] - setting.hours)
    found = [
        _cut(rows[start:end].float(), setting, stride)
        for start, end, stride in zip(starts, ends, strides, strict=True)
    ]
    return found[0], found[1], found[2]


def _cut(rows: Tensor, setting: Setting, stride: int) -> Windows:
    both = rows.unfold(0, setting.hours + setting.ahead, stride).transpose(1, 2)
    past, future = both[:, : setting.hours], both[:, setting.hours :]
    level = past.mean(1, keepdim=True)
    return Windows(past - level, future - level)


def _series(found: Windows, task: Task, seed: int) -> Series:
    """The past, all or half of it, followed by the instants of the future to predict."""
    past, future = found
    n, hours, _ = past.shape
    values = torch.cat([past, torch.zeros_like(future)], 1)
    seen = torch.ones(n, hours, dtype=torch.bool)
    if task == "thinned":
        seen = torch.rand(n, hours, generator=torch.Generator().manual_seed(seed)) < 0.5
    later = torch.zeros(future.shape[:2], dtype=torch.bool)
    asked = torch.cat([torch.zeros_like(seen), ~later], 1)
    observed = torch.cat([seen, later], 1)
    return Series(
        values=values,
        observed=observed.unsqueeze(-1).expand_as(values),
        times=torch.arange(float(values.shape[1])).expand(n, -1),
        mask=observed | asked,  # hours that were left out are not tokens
        targets=torch.cat([torch.zeros_like(past), future], 1),
        asked=asked.unsqueeze(-1).expand_as(values),
    )


@dataclass(frozen=True, kw_only=True)
class ForecastRun:
    """Training of a series model on forecasting.

    Attributes:
        task: all hours of the past, or half of them.
        model: options of the model.
        training: options of the training loop.
        setting: the windows.
        data: folder with the file; its path is not part of the configuration.
    """

    task: Task
    model: SeriesConfig
    training: TrainConfig
    setting: Setting = field(default_factory=Setting)
    data: str = field(default="", metadata={"place": True})

    @property
    def updates(self) -> int:
        """Maximum number of updates."""
        assert self.training.epochs is not None
        room = MONTHS[0] * MONTH - self.setting.hours - self.setting.ahead
        return self.training.epochs * -(-(room // self.setting.stride + 1) // BATCH)

    def execute(self, folder: Path, *, show: bool) -> dict[str, Any]:
        """Train, or resume training; see ``cell.Run``."""
        parts = windows(self.data, self.setting)
        data = Splits(*(_series(part, self.task, seed) for seed, part in enumerate(parts)))
        about = {"task": self.task, "setting": dataclasses.asdict(self.setting)}
        return train_series(
            self.model, self.training, data, folder, batch_size=BATCH, about=about, show=show
        )


@dataclass(frozen=True, kw_only=True)
class SimpleRun:
    """A forecast without gradient descent.

    Attributes:
        kind: ``"linear"``, one map for all channels from their past to their future, or
            ``"persistence"``, the last value.
        setting: the windows.
        data: folder with the file.
    """

    kind: Literal["linear", "persistence"]
    setting: Setting = field(default_factory=Setting)
    data: str = field(default="", metadata={"place": True})

    @property
    def updates(self) -> int:
        """A single step."""
        return 1

    def execute(self, folder: Path, *, show: bool) -> dict[str, Any]:
        """Fit, and measure on validation and test windows."""
        train, validation, test = windows(self.data, self.setting)
        maps = self._maps(train)
        error = self._forecast(maps, train) - train.future
        variance = error.square().mean(0)  # [ahead, 7]

        def scores(part: Windows) -> dict[str, float]:
            found = self._forecast(maps, part)
            return gaussian_scores(found, variance.expand_as(found), part.future)

        return {"metrics": scores(test), "validation": scores(validation), "curve": []}

    def _maps(self, train: Windows) -> Tensor | None:
        """Least squares over windows and channels, with a ridge of 1e-3, ``[hours, ahead]``."""
        if self.kind == "persistence":
            return None
        x, y = (z.transpose(1, 2).flatten(0, 1).double() for z in train)
        gram = x.T @ x
        ridge = 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        found: Tensor = torch.linalg.solve(gram + ridge, x.T @ y)
        return found

    def _forecast(self, maps: Tensor | None, part: Windows) -> Tensor:
        if maps is None:
            return part.past[:, -1:].expand_as(part.future)
        return torch.einsum("nhc,ha->nac", part.past, maps.to(part.past.dtype))


@dataclass(frozen=True, kw_only=True)
class ForecastScale:
    """Settings of the experiment at one scale.

    Attributes:
        setting: the windows.
        epochs: maximum number of epochs.
        seeds: seeds of the initial weights and of the order of batches.
        changes: differences from the published protocol, for the table.
    """

    setting: Setting
    epochs: int
    seeds: tuple[int, ...]
    changes: tuple[str, ...]


_FULL = "96 hours observed, 96 predicted; 12 months for training, 4 for validation, 4 for test"
SCALES: dict[Scale, ForecastScale] = {
    "smoke": ForecastScale(
        setting=Setting(hours=12, ahead=6, stride=400, test_stride=400),
        epochs=1,
        seeds=(0,),
        changes=("a few short windows, one epoch: only shows that it runs",),
    ),
    "cpu": ForecastScale(
        setting=Setting(),
        epochs=20,
        seeds=(0, 1),
        changes=(_FULL, "training windows 8 hours apart"),
    ),
    "paper": ForecastScale(
        setting=Setting(stride=1),
        epochs=20,
        seeds=(0, 1, 2),
        changes=(_FULL, "training windows at every hour"),
    ),
}
"""The experiment at each scale."""


def training(epochs: int, seed: int) -> TrainConfig:
    """Training options, the same for every model."""
    return TrainConfig(
        epochs=epochs,
        lr=2e-3,
        weight_decay=0.01,
        clip=1.0,
        schedule="cosine",
        eval_every="epoch",
        monitor="nll",
        mode="min",
        patience=6,
        seed=seed,
    )


def cells(scale: Scale) -> list[Cell]:
    """Simple forecasts first; then every model at every seed."""
    at, found = SCALES[scale], []
    every = at.setting if scale == "smoke" else dataclasses.replace(at.setting, stride=1)
    for kind in SIMPLE:  # cheap enough to use all windows
        run: Any = SimpleRun(kind=kind, setting=every)  # type: ignore[arg-type]
        labels = {"model": kind, "task": "hourly"}
        found.append(Cell(experiment="forecasting", labels=labels, run=run))
    for seed in at.seeds:
        for task, models in MODELS.items():
            for name, model in models.items():
                how = training(at.epochs, seed)
                run = ForecastRun(task=task, model=model, training=how, setting=at.setting)
                labels = {"model": name, "task": task, "seed": f"seed{seed}"}
                found.append(Cell(experiment="forecasting", labels=labels, run=run))
    return found


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Scores of all forecasts on the test windows."""
    names = [("hourly", name) for name in (*MODELS["hourly"], *SIMPLE)]
    names += [("thinned", name) for name in MODELS["thinned"]]
    forms = {"mse": ".3f", "crps": ".3f", "nll": ".3f", "coverage": ".1%"}
    rows = [
        [task, name]
        + [
            over_seeds(results, metric, form, task=task, model=name)
            for metric, form in forms.items()
        ]
        for task, name in names
    ]
    header = ["past", "model", "MSE", "CRPS", "NLL, nats", "95 % coverage"]
    below = notes(scale, SCALES[scale].changes)
    return [Table("ETTh1, forecasts of all 7 channels, test windows", header, rows, below)]


EXPERIMENT = Experiment(name="forecasting", source=None, cells=cells, tables=tables, metric="mse")
