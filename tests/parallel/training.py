"""Run by every rank: ``-m tests.parallel.training all FOLDER`` under torchrun, or ``killed``.

Trains in every way that the number of ranks allows, each in a folder of its own.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from kalman_attention.parallel.ranks import Parallel, from_environment
from kalman_attention.train import (
    NonFiniteError,
    TensorBatches,
    TrainConfig,
    fit,
    token_evaluation,
    token_loss,
)
from kalman_attention.train.optim import Rates, param_groups
from tests.models.small import small, text
from tests.parallel import exactness

STEPS = 20
OPTIONS = {
    "max_steps": STEPS, "clip": 1.0, "schedule": "trapezoidal", "eval_every": 10,
    "log_every": 1, "save_every": 5, "save_seconds": None, "monitor": "loss", "mode": "min",
}  # fmt: skip

WAYS = {
    2: {"ddp": ("ddp", 1), "fsdp": ("fsdp", 1), "context": ("ddp", 2)},
    4: {"ddp, data 2 x context 2": ("ddp", 2), "fsdp, data 2 x context 2": ("fsdp", 2)},
}
"""Name of a run to kind and context, by the number of ranks."""


def targets_that_differ(tokens):
    """Inputs and targets, with ever fewer targets that count: means of means would be wrong."""
    targets = tokens[:, 1:].clone()
    for i, row in enumerate(targets):
        row[: i % 7] = -100
    return tokens[:, :-1], targets


def train(folder, parallel=None, *, seed=0, double=False, loss=None, sample=False, **options):
    """The run of the tests: uneven batches, groups of the paper, tied weights."""
    config = TrainConfig(**{**OPTIONS, **options})
    between = "sample" if sample else "mean"
    model = small("kla*2", seed=seed, tie_embeddings=True, mlp="relu2", embedding_std=0.3,
                  between_blocks=between, kla={"prior": "learned"})  # fmt: skip
    model = model.double() if double else model
    model.gradient_checkpointing = sample
    batches = TensorBatches(targets_that_differ(text(18, 12)), batch_size=4, seed=1)
    evaluate = token_evaluation([targets_that_differ(text(4, 12, seed=2))])
    groups = param_groups(model, rates=Rates(embedding=1e-2, eps=1e-8))
    return model, fit(
        model, batches, loss or token_loss(), config, folder=folder, evaluate=evaluate,
        groups=groups, parallel=parallel, progress=False,
    )  # fmt: skip


def rows_loss(model, batch, generator):
    """A plain function of rows, with a metric: the mean over rows is what one process has."""
    inputs, targets = batch
    logits = model(inputs).logits
    found = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=-100, reduction="none"
    ).mean(1)
    return found.mean(), {"largest": found.detach().mean() * 2.0}


VARIANTS = {
    "": {},
    " accumulated": {"double": True, "accumulate": 2},
    " rows": {"double": True, "loss": rows_loss},
}
"""Name of a variant to what is different. In float64 rounding is no excuse."""


def run_all(folder):
    with from_environment(timeout=60.0) as first:
        exactness.check(Parallel("ddp", first.size))
        for name, (kind, context) in WAYS[first.size].items():
            ranks = Parallel(kind, context)
            for variant, options in VARIANTS.items():
                if context == 1 or variant != " rows":  # what is cut in time must say how
                    # Other weights on other ranks at first: those of rank 0 count.
                    train(folder / f"{name}{variant}", ranks, seed=ranks.everyone.rank, **options)
        if first.size == 2:
            train(folder / "fsdp then ddp", Parallel("fsdp"), max_steps=10, schedule="constant")
            train(folder / "fsdp then ddp", Parallel("ddp"), schedule="constant", seed=9)
            train(folder / "to one", Parallel("fsdp", 2), max_steps=10, schedule="constant")
            unison(folder)
            samples(folder)
        else:
            train(folder / "to four", Parallel("fsdp", 2), schedule="constant", seed=9)
        if first.main:
            print("all ranks agree")


def unison(folder):
    """A signal on one rank stops all at one step; a loss that is not finite is found by all."""
    ranks = Parallel("ddp")

    def signalled(model, batch, generator):
        if ranks.everyone.rank == 1 and next(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return rows_loss(model, batch, generator)

    calls = iter(range(99))
    with pytest.raises(SystemExit, match="143"):
        train(folder / "signal", ranks, loss=signalled)

    def poisoned(model, batch, generator):
        loss, metrics = rows_loss(model, batch, generator)
        return loss * (float("nan") if ranks.everyone.rank == 1 else 1.0), metrics

    for kind in ("ddp", "fsdp"):
        with pytest.raises(NonFiniteError, match="update 0"):
            train(folder / f"poison {kind}", Parallel(kind), loss=poisoned)


def samples(folder):
    """KLA+, samples between blocks, recomputed blocks: weights are used outside of ``forward``."""
    loss = token_loss("marginal", num_samples=2)
    for kind, context in (("ddp", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2)):
        where = folder / f"marginal {kind} {context}"
        ranks = Parallel(kind, context)
        train(where, ranks, double=True, loss=loss, sample=True, max_steps=4, schedule="constant")


class OwnLoss:
    """The token loss, with something done before it."""

    def __init__(self, before):
        self.before, self.loss = before, token_loss()
        self.piece = self.loss.piece

    def total(self, *arguments):
        self.before()
        return self.loss.total(*arguments)

    def __call__(self, *arguments):
        self.before()
        return self.loss(*arguments)


def killed(folder, kind, context):
    """A run whose rank 1 kills itself after step 10, and that is slow enough to be killed later."""
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with from_environment(kind, context=int(context), timeout=60.0) as ranks:
        (folder.parent / f"pid-{ranks.everyone.rank}").write_text(str(os.getpid()))
        calls = iter(range(999))

        def before():
            if start == 0 and ranks.everyone.rank == 1 and next(calls) == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.1 if start == 1 else 0.0)

        train(folder, ranks, loss=OwnLoss(before), save_every=2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # no power fails here
    what, where, *rest = sys.argv[1:]
    {"all": run_all, "killed": killed}[what](Path(where), *rest)
