"""``pendulum``: a pendulum's angle from noisy images at irregular times (``tasks/pendulum.py``).

The benchmark of Kalman-type recurrent networks (RKN, CRU, S5). Filtering models see the images up
to each time; smoothing models see all images, which is a different task and listed separately.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kalman_attention._tables import Table
from kalman_attention.models.series_config import SeriesConfig
from kalman_attention.published import PENDULUM
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, notes
from kalman_attention.recipes.series_run import Series, Splits, over_seeds, train_series
from kalman_attention.tasks.pendulum import SIZE, Pendulum, PendulumSequences
from kalman_attention.train.config import TrainConfig

BATCH = 50
BASE = SeriesConfig(
    channels=SIZE, images=True, outputs=2, num_layers=4, time_scale=2.0, tell_gaps=True
)
"""Tokens are two steps of the simulation apart on average."""

MODELS: dict[str, SeriesConfig] = {
    "kla": BASE,
    "kla without time": dataclasses.replace(BASE, use_time=False),
    "gru": dataclasses.replace(BASE, mixer="gru"),
    "gru without time": dataclasses.replace(BASE, mixer="gru", use_time=False),
    "kla, smoothing": dataclasses.replace(BASE, kla={**BASE.kla, "smooth": True}),
}
"""Rows of the table."""


@dataclass(frozen=True, kw_only=True)
class PendulumRun:
    """Training of a series model on the pendulum.

    Attributes:
        model: options of the model.
        training: options of the training loop.
        task: options of the task that differ from the published ones.
        sizes: number of sequences for training, validation and test.
    """

    model: SeriesConfig
    training: TrainConfig
    task: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, int, int] = (2000, 500, 1000)

    @property
    def updates(self) -> int:
        """Number of updates."""
        assert self.training.epochs is not None
        return self.training.epochs * -(-self.sizes[0] // BATCH)

    def execute(self, folder: Path, *, show: bool) -> dict[str, Any]:
        """Train, or resume training; see ``cell.Run``."""
        about = {"task": self.task, "sizes": self.sizes}
        data = _data(Pendulum(**self.task), self.sizes)
        return train_series(
            self.model, self.training, data, folder, batch_size=BATCH, about=about, show=show
        )


@functools.lru_cache(maxsize=1)  # shared by the cells of a process
def _data(task: Pendulum, sizes: tuple[int, int, int]) -> Splits:
    train, validation, test = sizes
    return Splits(
        _series(task.generate("train", train)),
        _series(task.generate("validation", validation)),
        _series(task.generate("test", test)),
    )


def _series(found: PendulumSequences) -> Series:
    real = torch.ones(found.times.shape, dtype=torch.bool)
    asked = torch.ones(found.targets.shape, dtype=torch.bool)
    return Series(found.images, real, found.times, real, found.targets, asked)


@dataclass(frozen=True, kw_only=True)
class PendulumScale:
    """Settings of the experiment at one scale.

    Attributes:
        run: fields of the runs.
        epochs: number of epochs.
        seeds: seeds of the initial weights and of the order of batches; all use the same data.
        changes: differences from the published protocol, for the table.
    """

    run: dict[str, Any]
    epochs: int
    seeds: tuple[int, ...]
    changes: tuple[str, ...]


_FULL = "2,000 sequences for training, 500 for validation, 1,000 for test; 50 of 100 steps kept"
SCALES: dict[Scale, PendulumScale] = {
    "smoke": PendulumScale(
        run={"sizes": (50, 10, 10), "task": {"steps": 10, "kept": 5, "substeps": 10}},
        epochs=1,
        seeds=(0,),
        changes=("one update: only shows that it runs",),
    ),
    "cpu": PendulumScale(
        run={}, epochs=60, seeds=(0, 1, 2), changes=(_FULL, "60 epochs, batches of 50")
    ),
    "paper": PendulumScale(
        run={}, epochs=100, seeds=tuple(range(5)), changes=(_FULL, "100 epochs, batches of 50")
    ),
}
"""The experiment at each scale."""


def training(epochs: int, seed: int) -> TrainConfig:
    """Training options of every model, chosen on the validation set (docs/series_models.md)."""
    return TrainConfig(
        epochs=epochs,
        lr=8e-3,
        clip=1.0,
        warmup_steps=0 if epochs == 1 else 40,
        schedule="cosine",
        eval_every="epoch",
        monitor="nll",
        mode="min",
        seed=seed,
    )


def cells(scale: Scale) -> list[Cell]:
    """Every model at every seed, seed by seed."""
    setting = SCALES[scale]
    return [
        Cell(
            experiment="pendulum",
            labels={"model": name, "seed": f"seed{seed}"},
            run=PendulumRun(model=model, training=training(setting.epochs, seed), **setting.run),
        )
        for seed in setting.seeds
        for name, model in MODELS.items()
    ]


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Test error of our models, followed by published ones, best first."""
    rows = [
        [
            name,
            over_seeds(results, "mse", ".2f", factor=1e3, model=name),
            over_seeds(results, "nll", ".2f", model=name),
            over_seeds(results, "coverage", ".1%", model=name),
        ]
        for name in MODELS
    ]
    rows += [[f"{name} (published)", error, "", ""] for name, error in PENDULUM.items()]
    below = notes(
        scale,
        (
            *SCALES[scale].changes,
            "smoothing sees images after the time of the prediction; our other rows do not",
            "published figures are on test sets of the same kind, not on the same sequences",
        ),
    )
    header = ["model", "MSE, 1e-3", "NLL, nats", "95 % coverage"]
    return [Table("Pendulum, sine and cosine of the angle", header, rows, below)]


EXPERIMENT = Experiment(name="pendulum", source=None, cells=cells, tables=tables, metric="mse")
