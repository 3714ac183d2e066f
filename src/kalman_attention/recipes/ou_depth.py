"""``ou-depth``: selective copying over depth, with and without the prior (``fig:ou-ablation``).

The blocks are in the paper's scaffold, as in ``mad``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kalman_attention._tables import Table, percent
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.scaffold import with_scaffold
from kalman_attention.nn.config import KLAConfig
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, mean_of_best, notes
from kalman_attention.recipes.task_run import TaskRun, published_training
from kalman_attention.tasks.registry import make_task

_VARIANTS: tuple[Literal["ou", "none"], ...] = ("ou", "none")


@dataclass(frozen=True, kw_only=True)
class DepthScale:
    """Settings of the experiment at one scale.

    Attributes:
        options: options of selective copying.
        depths: numbers of blocks.
        d_model: width.
        epochs: maximum number of passes over the training set.
        rate: learning rate.
        batch_size: sequences per update.
        seeds: seeds of data, initial weights and order of batches.
        changes: differences from the published protocol, for the table.
    """

    options: dict[str, Any]
    depths: tuple[int, ...] = (1, 2, 4, 8, 12)
    d_model: int = 128
    epochs: int = 750
    rate: float = 1e-3
    batch_size: int = 172
    seeds: tuple[int, ...] = (0,)
    changes: tuple[str, ...] = ()


_SMALL = {"seq_len": 64, "num_copied": 8}

SCALES: dict[Scale, DepthScale] = {
    "smoke": DepthScale(
        options={**_SMALL, "train_size": 64, "test_size": 32},
        depths=(1, 2),
        d_model=16,
        epochs=1,
        changes=("64 training sequences, one epoch: only shows that it runs",),
    ),
    "cpu": DepthScale(
        options={**_SMALL, "train_size": 6_400},
        d_model=64,
        epochs=15,
        batch_size=32,
        changes=(
            "64 tokens with 8 to copy instead of 256 with 16; 6,400 training sequences; width 64",
            "15 epochs of batches of 32 instead of 750 of 172; one seed instead of five",
        ),
    ),
    "paper": DepthScale(
        options={},
        seeds=(0, 1, 2, 3, 4),
        changes=("depths, width and length are ours: the paper shows a figure without settings",),
    ),
}
"""The experiment at each scale."""


def cells(scale: Scale) -> list[Cell]:
    """Both variants at every depth."""
    setting = SCALES[scale]
    found = []
    for seed in setting.seeds:
        for depth in setting.depths:
            for variant in _VARIANTS:
                labels = {"prior": variant, "depth": f"{depth}blocks", "seed": f"seed{seed}"}
                run = _run(setting, depth, variant, seed)
                found.append(Cell(experiment="ou-depth", labels=labels, run=run))
    return found


def _run(setting: DepthScale, depth: int, variant: Literal["ou", "none"], seed: int) -> TaskRun:
    d_model = setting.d_model
    vocabulary = make_task("selective_copying", **setting.options).vocab_size
    layer = KLAConfig(d_model=d_model, d_state=8, discretisation=variant)
    model = LanguageModelConfig(
        vocab_size=vocabulary, d_model=d_model, plan=("kla",) * depth, kla=layer
    )
    return TaskRun(
        task="selective_copying",
        task_options=setting.options,
        model=with_scaffold(model, "encoder-decoder"),
        batch_size=setting.batch_size,
        eval_batch_size=172,
        training=published_training(epochs=setting.epochs, seed=seed, lr=setting.rate),
    )


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """Accuracy over depth, with and without the prior."""
    depths = SCALES[scale].depths
    rows = [
        [
            "OU prior" if variant == "ou" else "no prior",
            *(percent(mean_of_best(results, prior=variant, depth=f"{d}blocks")) for d in depths),
        ]
        for variant in _VARIANTS
    ]
    header = ["blocks", *(str(depth) for depth in depths)]
    return [
        Table(
            "Selective copying over depth, accuracy, %",
            header,
            rows,
            notes(scale, SCALES[scale].changes),
        )
    ]


EXPERIMENT = Experiment(
    name="ou-depth",
    source="fig:ou-ablation",
    cells=cells,
    tables=tables,
)
