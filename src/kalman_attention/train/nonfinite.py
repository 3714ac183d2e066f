"""Saving an update that was infinite or NaN, with everything needed to reproduce it."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kalman_attention._files import write_file
from kalman_attention.models.storage import distinct_tensors, model_files
from kalman_attention.parallel.batch import named_tensors
from kalman_attention.parallel.ranks import Parallel
from kalman_attention.parallel.sharding import whole

FOLDER = "nonfinite"


class NonFiniteError(ArithmeticError):
    """A loss or a gradient is infinite or NaN.

    Attributes:
        folder: the weights before the update, its batches and a report.
    """

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


def keep_nonfinite(
    run: Path,
    step: int,
    model: nn.Module,
    batches: Sequence[Any],
    losses: Sequence[float],
    norm: float,
    seed: int,
    parallel: Parallel,
) -> NonFiniteError:
    """Save the failed update, and build the error that describes it.

    Args:
        run: folder of the run.
        step: updates made before it.
        model: the model, with the weights before the update and the gradients of the update.
        batches: batches of the update.
        losses: loss of each batch.
        norm: norm of all gradients.
        seed: seed of the global generators at the start of the update.
        parallel: the processes, all of which call this; one of them writes.

    Returns:
        The error to raise.
    """
    from safetensors.torch import save  # here, so that importing the library needs only torch

    folder = run / FOLDER / f"step-{step:08d}"
    bad = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(whole(parameter.grad)).all())
    ]
    tensors = {name: t.detach().clone() for name, t in named_tensors(list(batches))}
    report = {
        "step": step,
        "losses": [str(x) for x in losses],
        "gradient_norm": str(norm),
        "seed": seed,
        "nonfinite_gradients": bad,
    }
    weights = parallel.collect(distinct_tensors(model))
    files = {
        **model_files(model, weights),
        "batches.safetensors": save(tensors),
        "report.json": json.dumps(report, indent=1).encode(),
    }
    if parallel.main:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, data in files.items():
            write_file(folder / name, data)
    what = f"the loss is {losses}" if not all(map(math.isfinite, losses)) else (
        f"the loss is {losses} but the norm of the gradients is {norm}"
    )  # fmt: skip
    where = f" Gradients that are not finite: {', '.join(bad[:5])}." if bad else ""
    return NonFiniteError(
        f"update {step} (counted from 0): {what}.{where} Training stopped before it; the weights, "
        f"the batches and a report are in {folder}. Try a lower learning rate, gradient clipping "
        "(clip), or a longer warm-up, in another folder.",
        folder,
    )
