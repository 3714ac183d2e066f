"""``kla demo``: KLA and Mamba learn selective copying and state tracking, a minute each."""

from collections.abc import Sequence
from typing import Any

from kalman_attention._tables import Table, percent
from kalman_attention.baselines.mamba import MambaConfig
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.nn.config import KLAConfig
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, best
from kalman_attention.recipes.state_tracking import TrackingScale, make_run
from kalman_attention.recipes.task_run import TaskRun
from kalman_attention.tasks.registry import make_task
from kalman_attention.train.config import TrainConfig

MODELS = ("kla", "mamba")
TRACKERS = ("rotating-kla", "mamba")
SUMMARY = "KLA and Mamba learn to copy selectively"
TRACKING_SUMMARY = (
    "Five objects are permuted again and again, and the models predict where they are after every "
    "permutation (the group A5). One block each, trained on at most 20 permutations and tested on "
    "up to 200. Tokens rotate the latent of the rotating KLA; a decay cannot store the answer."
)
TASK = {"seq_len": 32, "num_copied": 4, "train_size": 1, "test_size": 512}
TRACKING = TrackingScale(max_steps=1_000, test_lens=(20, 50, 100, 200), test_size=128)
_WIDTH = 64
_NOTE = (
    "32 tokens with 4 to copy instead of 256 with 16, width 64, new sequences in every batch, one "
    "seed, one learning rate: a demonstration, not a comparison"
)
_TRACKING_NOTE = "width 64, one seed, one learning rate; kla reproduce state-tracking has more"


def cells(scale: Scale) -> list[Cell]:
    """One block of each model, with equal state sizes, on both tasks."""
    copying = [
        Cell(experiment="demo", labels={"model": name, "task": "selective_copying"}, run=_run(name))
        for name in MODELS
    ]
    tracking = [
        Cell(
            experiment="demo",
            labels={"model": name, "task": "a5"},
            run=make_run(TRACKING, name, "a5", depth=1, seed=0),
        )
        for name in TRACKERS
    ]
    return copying + tracking


def _run(name: str) -> TaskRun:
    return TaskRun(
        task="selective_copying",
        task_options=TASK,
        model=LanguageModelConfig(
            vocab_size=make_task("selective_copying", **TASK).vocab_size,
            d_model=_WIDTH,
            plan=(name,),
            kla=KLAConfig(d_model=_WIDTH, d_state=8),
            mamba=MambaConfig(d_model=_WIDTH, d_state=16, expand=1),
        ),
        batch_size=64,
        fresh=True,
        training=TrainConfig(
            max_steps=1_500,
            lr=3e-3,
            clip=5.0,
            schedule="cosine",
            eval_every=100,
            monitor="accuracy",
            save_seconds=10.0,
        ),
    )


def tables(scale: Scale, results: Sequence[dict[str, Any]]) -> list[Table]:
    """The accuracy of each model on both tasks, and the cost of training."""
    effort = ["parameters", "updates", "time, one core"]
    copying, tracking = [], []
    for name in MODELS:
        if result := best(results, model=name, task="selective_copying"):
            shown = percent(result["metrics"]["token_accuracy"])
            copying.append([name, shown, *_effort(result)])
    for name in TRACKERS:
        if result := best(results, model=name, task="a5"):
            shares = [found["accuracy"] for found in result["lengths"].values()]
            tracking.append([name, *map(percent, shares), *_effort(result)])
    lengths = [f"{length} steps" for length in TRACKING.test_lens]
    return [
        Table(
            "Selective copying: 4 tokens out of 32",
            ["model", "accuracy, %", *effort],
            copying,
            [_NOTE],
        ),
        Table(
            "A5: sequences entirely correct, %, trained on at most 20 steps",
            ["model", *lengths, *effort],
            tracking,
            [_TRACKING_NOTE],
        ),
    ]


def _effort(result: dict[str, Any]) -> list[str]:
    return [f"{result['parameters']:,}", str(result["steps"]), f"{result['seconds']:.0f} s"]


EXPERIMENT = Experiment(
    name="demo",
    source="a small version of tab:accuracy-heatmap",
    cells=cells,
    tables=tables,
)
