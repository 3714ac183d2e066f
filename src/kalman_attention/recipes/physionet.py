"""``physionet``: stays in intensive care, PhysioNet's Challenge 2012 (``data/measurements.py``).

Mortality: predict who dies in hospital, from 48 hours of measurements. Splits as in mTAN: 80 % and
20 % by scikit-learn with seed 42, and 20 % of the former for validation with seed 11. mTAN orders
stays by a directory listing, this experiment by record number, so the test sets differ. Every model
is the mean of two paths, a layer over time and an additive model of summaries of each channel. The
models are compared with boosted trees on such summaries.

Interpolation: half of the measurements are hidden and predicted.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from kalman_attention._extras import library
from kalman_attention._tables import Table
from kalman_attention.data.measurements import CHANNELS, Stays, read_stays
from kalman_attention.evaluation.series import class_scores
from kalman_attention.models.series_config import SeriesConfig
from kalman_attention.published import PHYSIONET
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, notes
from kalman_attention.recipes.series_run import (
    Series,
    Splits,
    over_seeds,
    series_loss,
    train_series,
)
from kalman_attention.train.config import TrainConfig

Task = Literal["mortality", "interpolation"]
Scaling = Literal["standard", "ranks"]
BATCH = 50
_DEFINING = ("task", "left_out", "minutes", "scaling", "stays")
TOLD_ONCE = 4
"""Age, gender, height and type of unit: recorded on admission, and not predicted."""

MORTALITY = SeriesConfig(
    channels=len(CHANNELS),
    outputs=2,
    head="classes",
    num_layers=1,
    channel_memories=2,
    tell_variance=False,
    dropout=0.3,
    summary_knots=4,
)
INTERPOLATION = SeriesConfig(
    channels=len(CHANNELS),
    outputs=len(CHANNELS),
    num_layers=1,
    channel_memories=2,
    kla={"d_state": 8, "smooth": True},
)


def _models(base: SeriesConfig) -> dict[str, SeriesConfig]:
    return {
        "kla": base,
        "kla without time": dataclasses.replace(base, use_time=False),
        "gru": dataclasses.replace(base, mixer="gru", channel_memories=0),  # no filter at all
    }


SCALING: dict[Task, Scaling] = {"mortality": "ranks", "interpolation": "standard"}
"""How channels are scaled."""
MODELS: dict[Task, dict[str, SeriesConfig]] = {
    "mortality": _models(MORTALITY),
    "interpolation": _models(INTERPOLATION),
}
"""Rows of the tables."""


@dataclass(frozen=True, kw_only=True)
class StaysRun:
    """Training of a series model on the stays.

    Attributes:
        task: the task.
        model: options of the model.
        training: options of the training loop.
        left_out: share of the measurements left out when training on mortality, drawn anew for
            every batch. A missing value is simply no evidence, so a stay with fewer measurements
            is as valid an example.
        minutes: times are rounded to multiples of this.
        stays: number of stays to use; None for all.
        scaling: ``"standard"``, or ``"ranks"``, see ``stay_splits``.
        data: folder with the files; its path is not part of the configuration.
    """

    task: Task
    model: SeriesConfig
    training: TrainConfig
    left_out: float = 0.4
    minutes: int = 30
    scaling: Scaling = "standard"
    stays: int | None = None
    data: str = field(default="", metadata={"place": True})

    @property
    def updates(self) -> int:
        """Maximum number of updates."""
        assert self.training.epochs is not None
        train = round(0.64 * (4000 if self.stays is None else self.stays))
        return self.training.epochs * -(-train // BATCH)

    def execute(self, folder: Path, *, show: bool) -> dict[str, Any]:
        """Train, or resume training; see ``cell.Run``."""
        splits = stay_splits(self.data, self.minutes, self.stays, self.scaling)
        if self.task == "interpolation":
            splits = Splits(_complete(splits[0]), *(_hidden(part) for part in splits[1:]))
        return train_series(
            self.model,
            self.training,
            splits,
            folder,
            batch_size=BATCH,
            loss=interpolation_loss if self.task == "interpolation" else self.thinned_loss,
            about={name: getattr(self, name) for name in _DEFINING},
            show=show,
        )

    def thinned_loss(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Tensor:
        """``series_loss`` with some of the measurements left out."""
        given = Series(*batch)
        keep = torch.rand(given.observed.shape, generator=generator) >= self.left_out
        return series_loss(model, given._replace(observed=given.observed & keep), generator)


@dataclass(frozen=True, kw_only=True)
class TreesRun:
    """Boosted trees (scikit-learn's, at their defaults) on summaries of each channel.

    Attributes:
        seed: seed of the trees.
        minutes: as for ``StaysRun``.
        stays: as for ``StaysRun``.
        data: as for ``StaysRun``.
    """

    seed: int
    minutes: int = 30
    stays: int | None = None
    data: str = field(default="", metadata={"place": True})

    @property
    def updates(self) -> int:
        """A single step."""
        return 1

    def execute(self, folder: Path, *, show: bool) -> dict[str, Any]:
        """Fit the trees, with early stopping on a held-out part of the training set."""
        ensemble = library("sklearn.ensemble", "series")
        splits = stay_splits(self.data, self.minutes, self.stays)
        trees = ensemble.HistGradientBoostingClassifier(early_stopping=True, random_state=self.seed)
        train, validation, test = splits
        known = ~torch.from_numpy(summaries(train)).isnan().all(0).numpy()  # observed in any stay
        trees.fit(summaries(train)[:, known], train.targets.numpy())

        def scores(part: Series) -> dict[str, float]:
            found = trees.predict_proba(summaries(part)[:, known])[:, 1]
            return class_scores(torch.from_numpy(found), part.targets)

        return {"metrics": scores(test), "validation": scores(validation), "curve": []}


def summaries(part: Series) -> Any:
    """Count, mean, deviation, lowest, highest, first, last of each channel, ``[n, 7 C]`` numpy."""
    seen, values = part.observed, part.values
    count = seen.sum(1)
    mean = (values * seen).sum(1) / count
    spread = (((values - mean.unsqueeze(1)) * seen).square().sum(1) / count).sqrt()
    low = values.masked_fill(~seen, torch.inf).amin(1)
    high = values.masked_fill(~seen, -torch.inf).amax(1)
    ends = [_end(values, seen), _end(values.flip(1), seen.flip(1))]
    nan = torch.full_like(mean, torch.nan)  # the trees treat NaN as missing
    found = [count.float(), *(x.where(count > 0, nan) for x in (mean, spread, low, high, *ends))]
    return torch.cat(found, 1).numpy()


def _end(values: Tensor, seen: Tensor) -> Tensor:
    """The first observed value of each channel."""
    first = seen.to(torch.uint8).argmax(1, keepdim=True)
    return values.gather(1, first).squeeze(1)


@functools.lru_cache(maxsize=2)  # shared by the cells of a process
def stay_splits(
    data: str, minutes: int, count: int | None, scaling: Scaling = "standard"
) -> Splits:
    """Stays for training, validation and test, with channels scaled by the training set.

    Args:
        data: folder with the files.
        minutes: times are rounded to multiples of this.
        count: number of stays to use; None for all.
        scaling: ``"standard"`` subtracts the mean and divides by the standard deviation, after
            which values are clipped at 5; ``"ranks"`` maps values to the quantiles of the normal
            distribution, so that neither skewed channels nor typing errors stand out.
    """
    if not data:
        raise ValueError(
            "this experiment reads files of PhysioNet 2012: pass their folder with --data."
        )
    split = library("sklearn.model_selection", "series").train_test_split
    stays = read_stays(data, minutes=minutes)
    rows = list(range(len(stays.died)))[:count]
    train, test = split(rows, train_size=0.8, random_state=42, shuffle=True)
    train, validation = split(train, train_size=0.8, random_state=11, shuffle=True)
    if scaling == "ranks":
        stays = stays._replace(values=_normal_scores(stays, train))
    centre, scale = _scaling(Stays(*(x[train] for x in stays)))
    return Splits(*(_series(stays, part, centre, scale) for part in (train, validation, test)))


def _normal_scores(stays: Stays, rows: Sequence[int]) -> Tensor:
    """Values as quantiles of the normal distribution, by their ranks among those of some stays.

    Equal values share the middle of their ranks; values in between are interpolated.
    """
    values, found = stays.values.numpy(), np.zeros(stays.values.shape, np.float32)
    for channel in range(values.shape[-1]):
        known = stays.values[rows, :, channel][stays.observed[rows, :, channel]]
        if len(known):
            distinct, count = np.unique(known.numpy(), return_counts=True)
            middle = (count.cumsum() - 0.5 * count) / len(known)
            scores = torch.special.ndtri(torch.from_numpy(middle)).numpy()
            found[..., channel] = np.interp(values[..., channel], distinct, scores)
    return torch.from_numpy(found) * stays.observed


def _scaling(stays: Stays) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the observed values of each channel."""
    count = stays.observed.sum((0, 1)).clamp_min(1)
    centre = stays.values.double().sum((0, 1)) / count
    spread = ((stays.values.double() - centre) * stays.observed).square().sum((0, 1)) / count
    return centre.float(), spread.sqrt().clamp_min(1e-6).float()


def _series(stays: Stays, rows: Sequence[int], centre: Tensor, scale: Tensor) -> Series:
    values, observed, times, mask, died = (x[rows] for x in stays)
    # Outliers in these files are often typing errors.
    values = ((values - centre) / scale).clamp(-5.0, 5.0)
    return Series(values, observed, times, mask, died, torch.ones_like(died, dtype=torch.bool))


def _complete(part: Series) -> Series:
    """Everything observed and nothing to predict: what to hide is drawn anew for every batch."""
    return part._replace(targets=part.values, asked=part.observed)


def _hidden(part: Series, generator: torch.Generator | None = None) -> Series:
    """The same stays with half of their measurements hidden, as targets."""
    drawn = generator or torch.Generator().manual_seed(0)
    hide = torch.rand(part.observed.shape, generator=drawn) < 0.5
    hide[..., :TOLD_ONCE] = False
    hide &= part.observed
    return part._replace(observed=part.observed & ~hide, targets=part.values, asked=hide)


def interpolation_loss(model: nn.Module, batch: Any, generator: torch.Generator) -> Tensor:
    """``series_loss`` with different measurements hidden each time."""
    return series_loss(model, _hidden(Series(*batch), generator), generator)


@dataclass(frozen=True, kw_only=True)
class StaysScale:
    """Settings of the experiment at one scale.

    Attributes:
        run: fields of the runs that differ.
        epochs: maximum number of epochs, by task.
        seeds: seeds of the initial weights and of the order of batches, by task; the splits do not
            depend on them.
        changes: differences from the published protocol, for the table.
    """

    run: dict[str, Any]
    epochs: dict[Task, int]
    seeds: dict[Task, tuple[int, ...]]
    changes: tuple[str, ...]


_FULL = "4,000 stays of set a: 2,560 for training, 640 for validation, 800 for test"
_ROUNDED = "times rounded to half an hour; weights chosen on the validation set"
SCALES: dict[Scale, StaysScale] = {
    "smoke": StaysScale(
        run={"stays": 200, "minutes": 240},
        epochs={"mortality": 1, "interpolation": 1},
        seeds={"mortality": (0,), "interpolation": (0,)},
        changes=("200 stays, one epoch: only shows that it runs",),
    ),
    "cpu": StaysScale(
        run={},
        epochs={"mortality": 8, "interpolation": 24},
        seeds={"mortality": tuple(range(5)), "interpolation": (0, 1, 2)},
        changes=(_FULL, _ROUNDED),
    ),
    "paper": StaysScale(
        run={"minutes": 1},
        epochs={"mortality": 8, "interpolation": 30},
        seeds={"mortality": tuple(range(5)), "interpolation": tuple(range(5))},
        changes=(_FULL, "times to the minute; weights chosen on the validation set"),
    ),
}
"""The experiment at each scale."""


def training(task: Task, epochs: int, seed: int) -> TrainConfig:
    """Training options of a task, chosen without the test set."""
    classes = task == "mortality"
    return TrainConfig(
        epochs=epochs,
        lr=2e-3,
        weight_decay=0.05 if classes else 0.0,
        clip=1.0,
        schedule="cosine",
        eval_every="epoch",
        monitor="auroc" if classes else "nll",
        mode="max" if classes else "min",
        patience=4,
        seed=seed,
    )


def cells(scale: Scale) -> list[Cell]:
    """Every model of every task at every seed, followed by the trees."""
    setting, found = SCALES[scale], []

    def add(task: Task, model: str, seed: int, run: Any) -> None:
        labels = {"model": model, "task": task, "seed": f"seed{seed}"}
        found.append(Cell(experiment="physionet", labels=labels, run=run))

    for task, models in MODELS.items():
        for name, model in models.items():
            for seed in setting.seeds[task]:
                how = training(task, setting.epochs[task], seed)
                options = {"scaling": SCALING[task], **setting.run}
                add(task, name, seed, StaysRun(task=task, model=model, training=how, **options))
    for seed in setting.seeds["mortality"]:
        add("mortality", "boosted trees", seed, TreesRun(seed=seed, **setting.run))
    return found


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Mortality, followed by published figures, and interpolation."""

    def row(task: Task, name: str, **columns: str) -> list[str]:
        return [name] + [
            over_seeds(results, metric, form, task=task, model=name)
            for metric, form in columns.items()
        ]

    scores = {"auroc": ".3f", "auprc": ".3f", "ece": ".3f"}
    rows = [row("mortality", name, **scores) for name in (*MODELS["mortality"], "boosted trees")]
    rows += [[f"{name} (published)", f"{x:.3f}", "", ""] for name, x in PHYSIONET.items()]
    below = notes(scale, (*SCALES[scale].changes, "published: as mTAN's paper reports them"))
    mortality = Table(
        "PhysioNet 2012, mortality, test set", ["model", "AUROC", "AUPRC", "ECE"], rows, below
    )
    gaussian = {"mse": ".3f", "crps": ".3f", "nll": ".3f", "coverage": ".1%"}
    rows = [row("interpolation", name, **gaussian) for name in MODELS["interpolation"]]
    asked = (
        *SCALES[scale].changes,
        "half of the measurements hidden; errors in standard deviations of each channel; values "
        "clipped at 5 standard deviations",
    )
    header = ["model", "MSE", "CRPS", "NLL, nats", "95 % coverage"]
    interpolation = Table(
        "PhysioNet 2012, interpolation, test set", header, rows, notes(scale, asked)
    )
    return [mortality, interpolation]


EXPERIMENT = Experiment(name="physionet", source=None, cells=cells, tables=tables, metric="auroc")
