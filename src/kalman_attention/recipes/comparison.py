"""Comparison of finished pretraining runs: what each has learned, and how fast it trains."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kalman_attention._files import sha256
from kalman_attention._reading import checked, read_json
from kalman_attention.data.shards import INDEX, ShardedTokens
from kalman_attention.evaluation.checkpoint import RUN, data_of, load_checkpoint
from kalman_attention.evaluation.validation import validation_bits, validation_calibration
from kalman_attention.models.weights import WEIGHTS
from kalman_attention.parallel.ranks import Parallel
from kalman_attention.recipes.machine import about
from kalman_attention.recipes.pretrain import PretrainRecipe
from kalman_attention.recipes.pretrain_run import (
    SUMMARY,
    build_groups,
    build_loader,
    build_loss,
    build_model,
)
from kalman_attention.train.metrics import read_metrics
from kalman_attention.train.update import Updater

_EQUAL = ("tokens", "batch_tokens", "seq_len", "loader", "reset_state")


class FinishedRun(NamedTuple):
    """A finished pretraining run.

    Attributes:
        folder: folder of the run.
        recipe: its recipe.
        data: folder of its shards.
        checksum: checksum of the index of the shards, which identifies the dataset.
        summary: the summary that it wrote.
    """

    folder: Path
    recipe: PretrainRecipe
    data: Path
    checksum: str
    summary: dict[str, Any]


def open_run(folder: Path, data: Path | None = None) -> FinishedRun:
    """Open a finished run.

    Args:
        folder: folder of the run.
        data: folder of its shards, if they have moved.
    """
    if not (folder / SUMMARY).is_file():
        begun = (folder / RUN).is_file()
        why = "has not finished" if begun else "is not a pretraining run"
        raise ValueError(f"{folder} {why}: there is no {SUMMARY}. Only finished runs are compared.")
    origin, summary = read_json(folder / RUN), read_json(folder / SUMMARY)
    for name, kind in (("model", str), ("parameters", int), ("tokens", int)):
        checked(kind, summary.get(name), name, str(folder / SUMMARY))
    recipe = checked(PretrainRecipe, origin.get("recipe"), "recipe", str(folder / RUN))
    told, checksum = data_of(origin, folder / RUN)
    where = told if data is None else data
    if not (where / INDEX).is_file():
        raise ValueError(
            f"{folder} was trained on {where}, which no longer exists: pass its new path with "
            "--shards."
        )
    if sha256(where / INDEX) != checksum:
        raise ValueError(f"{where} does not contain the shards that {folder} was trained on.")
    return FinishedRun(folder, recipe, where, checksum, summary)


def check_comparable(runs: list[FinishedRun]) -> None:
    """Reject runs that differ in more than model, options and seed: in data, tokens, batches."""
    first = _footing(runs[0])
    for run in runs[1:]:
        differ = {k: v for k, v in _footing(run).items() if v != first[k]}
        if differ:
            told = "; ".join(f"{name}: {first[name]} and {value}" for name, value in differ.items())
            raise ValueError(f"{runs[0].folder} and {run.folder} are not comparable: {told}.")


def _footing(run: FinishedRun) -> dict[str, Any]:
    return {**{name: getattr(run.recipe, name) for name in _EQUAL}, "data": run.checksum}


def measure(run: FinishedRun, *, batch_size: int = 32) -> dict[str, Any]:
    """Bits per byte on the whole validation split, in rows as long as those of training."""
    model = load_checkpoint(run.folder).model
    recipe = run.recipe
    score = validation_bits(
        ShardedTokens(run.data),
        seq_len=recipe.seq_len,
        batch_size=batch_size,
        reset_state=recipe.reset_state,
    )
    with torch.no_grad():
        found = score(model)
    if not math.isfinite(found["bits_per_byte"]):
        raise ValueError(
            f"{run.folder} scores {found['bits_per_byte']} bits per byte, which is not finite."
        )
    records = read_metrics(run.folder)
    curve = [
        {"tokens": r["step"] * recipe.batch_tokens, "bits_per_byte": r["bits_per_byte"]}
        for r in records
        if r["kind"] == "eval" and "bits_per_byte" in r
    ]
    return {
        "weights": weights_of(run),
        "summary": run.summary,
        "recipe": recipe.to_dict(),
        "validation": found,
        "curve": curve,
        "about": about(),
    }


def measure_calibration(run: FinishedRun, *, batch_size: int = 32) -> dict[str, Any]:
    """ECE and AURC on the whole validation split, in rows as long as those of training."""
    recipe = run.recipe
    found = validation_calibration(
        load_checkpoint(run.folder).model,
        ShardedTokens(run.data),
        seq_len=recipe.seq_len,
        batch_size=batch_size,
        reset_state=recipe.reset_state,
    )
    return found._asdict()


def weights_of(run: FinishedRun) -> str:
    """The checksum of its weights, which identifies the trained model."""
    return sha256(run.folder / WEIGHTS)


def training_passes(runs: Mapping[str, FinishedRun]) -> dict[str, Callable[[], None]]:
    """One update of every model, as in its run, ready to be timed."""
    return {name: _training_pass(run) for name, run in runs.items()}


def _training_pass(run: FinishedRun) -> Callable[[], None]:
    recipe, shards = run.recipe, ShardedTokens(run.data)
    model = build_model(recipe, shards.tokenizer().vocab_size).train()
    updater = Updater(
        model,
        build_loader(recipe, shards),
        build_loss(recipe),
        recipe.training(),
        build_groups(recipe, model),
        run.folder,
        Parallel(),
    )

    def update() -> None:
        updater.update(0, recipe.steps)

    return update
