"""A small run of the trainer for its tests, with everything that can get out of step.

``python -m tests.train.toy FOLDER`` runs a longer one.
"""

import json
import sys
from pathlib import Path

import torch

from kalman_attention.train.config import TrainConfig
from kalman_attention.train.data import TensorBatches
from kalman_attention.train.loop import fit
from kalman_attention.train.objective import token_evaluation, token_loss
from tests.models.small import small, text

OPTIONS = {
    "max_steps": 7,
    "lr": 1e-2,
    "clip": 1.0,
    "schedule": "trapezoidal",
    "eval_every": 3,
    "log_every": 1,
    "save_every": 1,
    "save_seconds": None,
    "monitor": "loss",
    "mode": "min",
}


LONGER = {"max_steps": 80, "eval_every": 20, "save_every": None, "threads": 1}


def build(seed=0, **options):
    """Model, batches of uneven sizes, loss, config, evaluation; posterior samples in two places."""
    config = TrainConfig(**{**OPTIONS, **options})
    model = small(seed=seed, between_blocks="sample")
    batches = TensorBatches([text(7, 6)], batch_size=3, seed=1)
    evaluate = token_evaluation([text(4, 6, seed=2)])
    return model, batches, token_loss("marginal", num_samples=2), config, evaluate


def run(folder, *, seed=0, progress=False, loss=None, evaluate=None, about=None, **options):
    """Train in a folder; returns the model and the result."""
    model, batches, own_loss, config, own_evaluate = build(seed, **options)
    result = fit(
        model,
        batches,
        loss or own_loss,
        config,
        folder=folder,
        evaluate=evaluate or own_evaluate,
        progress=progress,
        about=about,
    )
    return model, result


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    """Whether two sets of weights have the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def records(folder):
    """The metrics of a run, without the times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


if __name__ == "__main__":
    run(Path(sys.argv[1]), progress=True, **LONGER)
