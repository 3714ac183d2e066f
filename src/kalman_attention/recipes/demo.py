"""``kla demo``: KLA and Mamba learn to copy selectively, in about a minute each."""

from collections.abc import Sequence
from typing import Any

from kalman_attention.baselines.mamba import MambaConfig
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.nn.config import KLAConfig
from kalman_attention.recipes.cell import Cell
from kalman_attention.recipes.experiment import Experiment, Scale, best
from kalman_attention.recipes.table import Table, percent
from kalman_attention.recipes.task_run import TaskRun
from kalman_attention.tasks.registry import make_task
from kalman_attention.train.config import TrainConfig

MODELS = ("kla", "mamba")
SUMMARY = "KLA and Mamba learn to copy selectively"
TASK = {"seq_len": 32, "num_copied": 4, "train_size": 1, "test_size": 512}
_WIDTH = 64
_NOTE = (
    "32 tokens with 4 to copy instead of 256 with 16, width 64, fresh sequences, one seed, one "
    "learning rate: a demonstration, not a comparison"
)


def cells(scale: Scale) -> list[Cell]:
    """One block of each, with equal state sizes."""
    return [
        Cell(experiment="demo", labels={"model": name, "task": "selective_copying"}, run=_run(name))
        for name in MODELS
    ]


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
    """How well each model copies, and what it took."""
    rows = []
    for name in MODELS:
        result = best(results, model=name)
        if result is not None:
            metrics = result["metrics"]
            shown = [percent(metrics["token_accuracy"]), f"{result['parameters']:,}"]
            rows.append([name, *shown, str(result["steps"]), f"{result['seconds']:.0f} s"])
    header = ["model", "accuracy, %", "parameters", "updates", "time, one core"]
    return [Table("Selective copying: 4 tokens out of 32", header, rows, [_NOTE])]


EXPERIMENT = Experiment(
    name="demo",
    source="the small sister of tab:accuracy-heatmap",
    cells=cells,
    tables=tables,
)
