"""Pretraining: from a recipe and a folder of shards to a trained model.

The parts (model, batches, loss, parameter groups, evaluation) are separate functions, so that they
can be recombined.
"""

import dataclasses
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kalman_attention._files import sha256, write_json
from kalman_attention.data.loader import Batch, PackingLoader, WindowLoader
from kalman_attention.data.shards import INDEX, TRAIN, ShardedTokens
from kalman_attention.data.tokenizer import Tokenizer
from kalman_attention.evaluation.checkpoint import RUN, load_checkpoint, save_checkpoint
from kalman_attention.evaluation.validation import validation_bits
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.storage import load_model
from kalman_attention.parallel.ranks import Parallel
from kalman_attention.recipes.machine import about
from kalman_attention.recipes.pretrain import PretrainRecipe
from kalman_attention.train.checkpoint import checkpoints
from kalman_attention.train.loop import fit
from kalman_attention.train.metrics import Result
from kalman_attention.train.objective import Evaluate, Loss, token_loss
from kalman_attention.train.optim import param_groups

SUMMARY = "summary.json"

_COMPUTED = (
    *("vocab_size", "d_model", "layers", "mlp", "mlp_hidden", "between_blocks", "tie_embeddings"),
    *("logit_softcap", "norm_eps", "head_bias", "encoder_width", "decoder_widths"),
)
_SIGNIFICANT = ("seq_len", "batch_tokens", "loader", "reset_state", "loss", "num_samples")


def model_config(recipe: PretrainRecipe, vocab_size: int | None = None) -> LanguageModelConfig:
    """The model of a recipe, with the vocabulary of the data if it is known."""
    config = recipe.config
    return dataclasses.replace(config, vocab_size=vocab_size or config.vocab_size)


def build_model(
    recipe: PretrainRecipe,
    vocab_size: int | None = None,
    *,
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """The model with its initial weights, which depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = LanguageModel(model_config(recipe, vocab_size))
    model.embedding.to(getattr(torch, recipe.embedding_dtype))
    model.gradient_checkpointing = recipe.gradient_checkpointing
    return model.to(device)


@torch.no_grad()
def start_from(model: LanguageModel, tokenizer: Tokenizer, folder: str | os.PathLike[str]) -> None:
    """Initialise a model with the weights of another, for fine-tuning with a new schedule.

    Args:
        model: the model, modified in place; its dtypes do not change.
        tokenizer: tokenizer of the data.
        folder: a run, or a folder with a model and its tokenizer, native or HuggingFace's.
    """
    found = load_checkpoint(folder)
    if found.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ValueError(
            f"{folder} was trained with another tokenizer: the same tokens mean other text. Build "
            f"shards with its own tokenizer: kla data --tokenizer {folder}."
        )
    own, other = (_computed(x.config) for x in (model, found.model))
    differing = sorted(name for name in {*own, *other} if own.get(name) != other.get(name))
    if differing:
        raise ValueError(
            f"{folder} holds a different model from that of the recipe: they differ in "
            f"{', '.join(differing)}. Choose the recipe that it was trained with."
        )
    for name, parameter in model.named_parameters():
        parameter.copy_(found.model.get_parameter(name))


def _computed(config: LanguageModelConfig) -> dict[str, Any]:
    """The options that determine what a model computes, without initialisation and engine."""
    found = {name: getattr(config, name) for name in _COMPUTED}
    for name in config.layers:
        options = config.mixer_options(name)
        found[name] = dataclasses.replace(options, engine=None) if name == "kla" else options
    return found


def build_loader(recipe: PretrainRecipe, data: ShardedTokens) -> WindowLoader | PackingLoader:
    """Micro-batches of the training split, for all processes together."""
    sizes = (recipe.micro_batch, recipe.seq_len)
    if recipe.loader == "packing":
        return PackingLoader(data, *sizes, split=TRAIN)
    lanes = max(1, recipe.batch_tokens // recipe.seq_len)
    return WindowLoader(data, *sizes, lanes=lanes, split=TRAIN)


def build_loss(recipe: PretrainRecipe) -> Loss:
    """The loss of a micro-batch."""
    if not recipe.reset_state:
        return token_loss(recipe.loss, num_samples=recipe.num_samples)

    def loss(model: nn.Module, batch: Batch, generator: torch.Generator) -> Tensor:
        inputs, targets, borders = batch.packed()
        assert isinstance(model, LanguageModel)
        return model.loss(
            inputs,
            targets,
            kind=recipe.loss,
            num_samples=recipe.num_samples,
            generator=generator,
            cu_seqlens=borders,
        )

    return loss


def build_groups(recipe: PretrainRecipe, model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups with the rates of the recipe, scaled by width and batch."""
    return param_groups(
        model,
        d_model=recipe.config.d_model,
        batch_tokens=recipe.batch_tokens,
        rates=recipe.rates,
    )


def build_evaluation(recipe: PretrainRecipe, data: ShardedTokens) -> Evaluate:
    """Bits per byte of the validation split."""
    return validation_bits(
        data,
        seq_len=recipe.seq_len,
        batch_size=recipe.micro_batch,
        tokens=recipe.eval_tokens,
        reset_state=recipe.reset_state,
    )


def pretrain(
    recipe: PretrainRecipe,
    data: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    progress: bool = True,
    boards: Sequence[str] = (),
    command: str | None = None,
    parallel: Parallel | None = None,
    init: str | os.PathLike[str] | None = None,
) -> Result:
    """Pretrain a model, or resume the run in a folder, which becomes a checkpoint with a tokenizer.

    Args:
        recipe: what to train and how.
        data: folder written by ``kla data``.
        folder: folder of the run.
        device: device of the model.
        progress: show progress on standard error.
        boards: where else to send the metrics: "tensorboard", "wandb".
        command: the command that resumes an interrupted run; None for the command that was run.
        parallel: the processes that train together, from ``parallel.from_environment``; None for
            a single process. Batches, and so the learning curve, are those of a single process.
        init: a run or a folder with a model to take the initial weights from; None for random ones.

    Returns:
        ``Result`` of the training loop.
    """
    main = parallel is None or parallel.main
    shards, folder = ShardedTokens(data), Path(folder)
    shards.check()  # a few seconds; damaged shards could cost hours
    tokenizer = shards.tokenizer()
    model = build_model(recipe, tokenizer.vocab_size, device=device)
    begun = bool(checkpoints(folder / "checkpoints"))
    if init is not None and not begun:
        start_from(model, tokenizer, init)
    try:
        if main and not begun:
            folder.mkdir(parents=True, exist_ok=True)
            tokenizer.save(folder)
            write_json(folder / RUN, {**_origin(recipe, shards), **_named(init)})
        result = fit(
            model,
            build_loader(recipe, shards),
            build_loss(recipe),
            recipe.training(),
            folder=folder,
            evaluate=build_evaluation(recipe, shards),
            groups=build_groups(recipe, model),
            about={**_identity(recipe, shards), **_named(init)},
            progress=progress,
            boards=boards,
            command=command,
            parallel=parallel,
        )
        if main:
            final = load_model(folder / "last") if parallel else model  # here it may be sharded
            save_checkpoint(final, tokenizer, folder)
            write_json(folder / SUMMARY, summary(recipe, final, result))
    except OSError as error:
        told = _explained(error, folder)
        if told is error:
            raise
        raise told from error
    return result


def summary(recipe: PretrainRecipe, model: LanguageModel, result: Result) -> dict[str, Any]:
    """The results of a finished run, and its cost."""
    records = result.history
    last = [record for record in records if record["kind"] == "eval"][-1]
    seconds, tokens = records[-1]["seconds"], result.step * recipe.batch_tokens
    assert result.best is not None
    return {
        "model": recipe.model,
        "parameters": model.num_parameters(),
        "steps": result.step,
        "tokens": tokens,
        "bits_per_byte": last["bits_per_byte"],
        "loss": last["loss"],
        "best_bits_per_byte": result.best.value,
        "best_step": result.best.step,
        "hours": seconds / 3600,
        "tokens_per_second": tokens / seconds,
        "seed": recipe.seed,
        "about": about(),
    }


def _origin(recipe: PretrainRecipe, shards: ShardedTokens) -> dict[str, Any]:
    """The description of the run in its folder, for people and for ``kla eval``."""
    data = {"folder": str(shards.folder.resolve()), "index": sha256(shards.folder / INDEX)}
    return {"recipe": recipe.to_dict(), "data": data, "about": about()}


def _identity(recipe: PretrainRecipe, shards: ShardedTokens) -> dict[str, Any]:
    """What must be the same when the run resumes, besides weights, groups and schedule."""
    chosen = {name: getattr(recipe, name) for name in _SIGNIFICANT}
    return {**chosen, "data": sha256(shards.folder / INDEX), "tokenizer": shards.index.tokenizer}


def _named(init: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The description of the initial weights of a run; empty for random ones."""
    return {} if init is None else {"init": str(Path(init).resolve())}


def _explained(error: OSError, folder: Path) -> OSError:
    """Explain what a full disk means for the run; other errors are left unchanged."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if not full or "the disk is full" in str(error):
        return error
    kept = checkpoints(folder / "checkpoints")
    state = f"{kept[0]} is intact" if kept else "nothing was trained yet"
    return OSError(
        error.errno,
        f"the disk is full ({error.strerror}), in {folder}; {state}. Free some space and run the "
        "same command again to resume from there",
    )
