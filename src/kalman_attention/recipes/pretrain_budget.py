"""The budget of a pretraining run before it begins: sizes, rates, FLOPs and memory.

Figures are counted on the real modules; the paper's are shown next to them and never mixed in.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kalman_attention.models.block import Block
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.plan import format_plan
from kalman_attention.published import KLA_ONLY, PRETRAINING
from kalman_attention.recipes.pretrain import PretrainRecipe
from kalman_attention.recipes.pretrain_run import build_groups, model_config

_PROBE = 128
"""Length of the sequence on which the memory of a block is measured."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The figures of a run.

    Attributes:
        recipe: the run.
        model: its model, with the vocabulary that it will have.
        parameters: number of parameters.
        embedding: how many of them belong to the token embedding.
        rates: peak learning rate of every parameter group.
        flops: floating-point operations of the whole run, for matrix products and attention only: 6
            per parameter and token without the embedding, 6 seq_len d_model per token and attention
            block.
        state_bytes: memory of weights, gradients and the two moments of Adam.
        activation_bytes: approximate memory that a micro-batch keeps for the backward pass.
        train_tokens: training tokens in the data; None if there is no data yet.
    """

    recipe: PretrainRecipe
    model: LanguageModelConfig
    parameters: int
    embedding: int
    rates: dict[str, float]
    flops: float
    state_bytes: int
    activation_bytes: int
    train_tokens: int | None

    @property
    def tokens(self) -> int:
        """Training tokens, in whole updates."""
        return self.recipe.steps * self.recipe.batch_tokens


def make_budget(
    recipe: PretrainRecipe, *, vocab_size: int | None = None, train_tokens: int | None = None
) -> Budget:
    """Compute the budget of a run, without allocating the model.

    Args:
        recipe: the run.
        vocab_size: vocabulary size of the tokenizer; None for that of the preset.
        train_tokens: tokens of the training split, if there is data already.
    """
    config = model_config(recipe, vocab_size)
    with torch.device("meta"):
        model = LanguageModel(config)
    groups = build_groups(recipe, model)
    parameters, table = model.num_parameters(), model.embedding.weight.numel()
    attention = 6 * recipe.seq_len * config.d_model * config.layers.count("attention")
    per_token = 6 * (parameters - table) + attention
    stored = getattr(torch, recipe.embedding_dtype).itemsize
    return Budget(
        recipe=recipe,
        model=config,
        parameters=parameters,
        embedding=table,
        rates={group["name"]: group["lr"] for group in groups},
        flops=float(per_token) * recipe.steps * recipe.batch_tokens,
        state_bytes=4 * (4 * (parameters - table) + stored * table),
        activation_bytes=_activations(recipe, config),
        train_tokens=train_tokens,
    )


def budget_rows(budget: Budget) -> list[list[str]]:
    """The budget as table rows: quantity, this run, the paper (``-`` where it gives no figure).

    For models other than KLA, only figures that the paper gives for all models are shown.
    """
    recipe, config = budget.recipe, budget.model
    paper = PRETRAINING.get(recipe.size, {})
    if not recipe.model.startswith("kla-"):
        paper = {key: value for key, value in paper.items() if key not in KLA_ONLY}
    data = budget.train_tokens
    rows = [
        ("model", f"{recipe.model}: {format_plan(config.layers)}", "layers"),
        ("d_model", str(config.d_model), "d_model"),
        ("parameters", f"{budget.parameters:,}", "parameters"),
        ("of them token embedding", f"{budget.embedding:,}", ""),
        ("without token embedding", f"{budget.parameters - budget.embedding:,}", ""),
        ("vocabulary", f"{config.vocab_size:,}", "vocabulary"),
        ("tokens", f"{budget.tokens:,}", "tokens"),
        ("updates", f"{recipe.steps:,}", "updates"),
        ("tokens per update", f"{recipe.batch_tokens:,}", "batch_tokens"),
        ("  in micro-batches", _micro_batches(recipe), ""),
        ("sequence length", f"{recipe.seq_len:,}", "seq_len"),
        ("tokens per parameter", f"{budget.tokens / budget.parameters:.1f}", "ratio"),
        ("epochs over the data", f"{budget.tokens / data:.2f}" if data else "no data yet", ""),
        ("rows", _loader(recipe), ""),
        ("loss", recipe.loss, ""),
        ("matrix FLOPs", f"{budget.flops:.2e}", ""),
        ("memory: weights, gradients, Adam", _size(budget.state_bytes), ""),
        ("memory: one micro-batch, about", _size(budget.activation_bytes), ""),
        *((f"peak rate: {name}", f"{rate:.4g}", name) for name, rate in budget.rates.items()),
        ("weight decay (matrices, head)", f"{recipe.rates.weight_decay:g}", "weight_decay"),
        ("Adam", _adam(recipe), "adam"),
        ("schedule", _schedule(recipe), "schedule"),
        ("gradient clipping", f"{recipe.clip:g}", "clip"),
        ("precision", f"{recipe.dtype}, embedding {recipe.embedding_dtype}", "precision"),
    ]
    return [[what, here, paper.get(key, "-")] for what, here, key in rows]


def _micro_batches(recipe: PretrainRecipe) -> str:
    return f"{recipe.accumulate} of {recipe.micro_batch} rows"


def _loader(recipe: PretrainRecipe) -> str:
    reset = "state reset between documents" if recipe.reset_state else "state crosses documents"
    return f"{recipe.loader}, {reset}"


def _adam(recipe: PretrainRecipe) -> str:
    return f"betas {recipe.rates.betas[0]:g}, {recipe.rates.betas[1]:g}, eps {recipe.rates.eps:g}"


def _schedule(recipe: PretrainRecipe) -> str:
    return f"warm-up {recipe.warmup_steps}, decay over the last {recipe.warmdown:g}"


def _activations(recipe: PretrainRecipe, config: LanguageModelConfig) -> int:
    """Bytes kept for the backward pass, measured on one block of each kind and scaled up."""
    tokens = recipe.micro_batch * recipe.seq_len
    if recipe.gradient_checkpointing:  # inputs of all blocks, and one recomputed block
        kept = 4 * config.d_model * len(config.layers)
        kept += max(_kept(config, mixer) for mixer in set(config.layers))
    else:
        kept = sum(_kept(config, m) * n for m, n in Counter(config.layers).items())
    decoded = min(512, recipe.seq_len) * recipe.micro_batch * config.vocab_size
    return tokens * kept + 3 * 4 * decoded  # logits, their softmax, their gradient


def _kept(config: LanguageModelConfig, mixer: str) -> int:
    """Bytes per token that one block keeps."""
    block = Block(dataclasses.replace(config, plan=(mixer,)), mixer)
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    seen: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    x = torch.zeros(1, _PROBE, config.d_model, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found: Any = block(x)  # alive until counted, so that no address is used twice
    total = sum(seen.values())
    del found
    return total // _PROBE


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"
