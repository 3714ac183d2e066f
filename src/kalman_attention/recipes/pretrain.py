"""Pretraining recipes by name: what is trained, on how many tokens, at which rates.

A recipe has the name of a model preset; the size after the dash determines the rest. 45m and 180m
are the paper's (``app:lm-details``, ``tab:lm-pretrain-hparams``). Where the paper leaves a choice
open, these recipes use

- the loader that begins every row with a document (the paper names neither of the two that its
  source has used), and a state that is carried from document to document, as in that source;
- rates of head and vectors equal to the hidden rate (``train/optim.py``), a constant weight decay,
  and rates that decay to 0;
- no soft cap on the logits.

nano and micro are not in the paper: the same optimiser and schedule at sizes for two cores, with
windows instead of packed rows, because few documents of a small corpus fit into a short row.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from kalman_attention._reading import from_dict
from kalman_attention.models.config import LanguageModelConfig
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.names import full_name
from kalman_attention.models.presets import preset
from kalman_attention.train.config import TrainConfig
from kalman_attention.train.optim import Rates


@dataclass(frozen=True, kw_only=True)
class PretrainRecipe:
    """Everything that defines a pretraining run, except the data.

    Attributes:
        model: name of a preset.
        tokens: total number of training tokens; rounded to whole updates.
        batch_tokens: tokens per update.
        seq_len: tokens per row.
        micro_batch: rows per forward pass; their gradients are accumulated.
        loader: ``"packing"``, rows that begin with a document, or ``"window"``, the text cut into
            rows, where every row of an update comes from a different part of it.
        reset_state: forget at document boundaries; otherwise state and attention cross them.
        loss: cross-entropy of the posterior ``"mean"``, or the ``"marginal"`` likelihood (KLA+).
        num_samples: number of posterior samples for the marginal likelihood.
        rates: base learning rates, at width 768 and 2^19 tokens per update.
        clip: maximum norm of the gradient.
        warmup_steps: updates of linear warm-up.
        warmdown: fraction of the updates, at the end, in which the rates decay to 0.
        embedding_dtype: dtype in which the token embedding is stored.
        dtype: dtype of the computation; ``"bfloat16"`` uses autocast.
        gradient_checkpointing: recompute blocks in the backward pass instead of storing them.
        eval_every: updates between evaluations.
        eval_tokens: maximum number of tokens of the validation split to score.
        log_every: updates between lines of training metrics.
        save_seconds: seconds between checkpoints.
        threads: number of torch threads; None leaves it unchanged.
        seed: seed of the initial weights and of posterior samples.
        architecture: the model, if it differs from that of the preset; the name then determines
            the size only.
    """

    model: str
    tokens: int
    batch_tokens: int
    seq_len: int
    micro_batch: int
    loader: Literal["packing", "window"] = "packing"
    reset_state: bool = False
    loss: Literal["mean", "marginal"] = "mean"
    num_samples: int = 10
    rates: Rates = field(default_factory=Rates)
    clip: float = 3.0
    warmup_steps: int = 0
    warmdown: float = 0.4
    embedding_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    eval_every: int = 250
    eval_tokens: int = 1 << 20
    log_every: int = 10
    save_seconds: float = 600.0
    threads: int | None = None
    seed: int = 0
    architecture: LanguageModelConfig | None = None

    def __post_init__(self) -> None:
        counts = ("tokens", "batch_tokens", "seq_len", "micro_batch", "eval_tokens", "num_samples")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0.0 <= self.warmdown <= 1.0:
            raise ValueError(f"warmdown must be between 0 and 1, got {self.warmdown!r}.")
        rows = self.micro_batch * self.seq_len
        if self.batch_tokens % rows:
            near = max(1, round(self.batch_tokens / rows)) * rows
            raise ValueError(
                f"an update of {self.batch_tokens:,} tokens is not a whole number of "
                f"micro-batches: {self.micro_batch} rows of {self.seq_len:,} tokens are {rows:,}. "
                f"The nearest multiple is {near:,} tokens per update."
            )
        if self.loss == "marginal" and self.config.layers[-1] != "kla":
            raise ValueError(
                f"the marginal likelihood needs KLA as the last mixer, and {self.model} ends with "
                f"{self.config.layers[-1]}. Use the loss of the mean, or a model such as gpt+kla."
            )
        self.training()  # checks the options of the training loop

    @property
    def config(self) -> LanguageModelConfig:
        """The model, with the vocabulary of its preset."""
        return self.architecture or preset(self.model)

    @property
    def parameters(self) -> int:
        """Number of parameters of that model."""
        with torch.device("meta"):
            return LanguageModel(self.config).num_parameters()

    @property
    def size(self) -> str:
        """The part of the name after the dash: ``nano``, ``micro``, ``45m`` or ``180m``."""
        return self.model.rpartition("-")[2]

    @property
    def steps(self) -> int:
        """Number of updates."""
        return max(1, round(self.tokens / self.batch_tokens))

    @property
    def accumulate(self) -> int:
        """Micro-batches per update, of all processes together."""
        return self.batch_tokens // (self.micro_batch * self.seq_len)

    def training(self) -> TrainConfig:
        """The options of the training loop."""
        return TrainConfig(
            max_steps=self.steps,
            clip=self.clip,
            schedule="trapezoidal",
            warmup_steps=self.warmup_steps,
            decay_fraction=self.warmdown,
            accumulate=self.accumulate,
            eval_every=self.eval_every,
            log_every=self.log_every,
            save_seconds=self.save_seconds,
            monitor="bits_per_byte",
            mode="min",
            seed=self.seed,
            dtype=self.dtype,
            threads=self.threads,
        )

    def to_dict(self) -> dict[str, Any]:
        """As a dictionary of plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, found: object, where: str = "the recipe") -> "PretrainRecipe":
        """The inverse of ``to_dict``, also after a round trip through JSON.

        Args:
            found: nested dictionaries; names and types are checked.
            where: source of the data, such as a file, for error messages.
        """
        return from_dict(cls, found, where)


_PAPER: dict[str, Any] = {"seq_len": 2048}
_SMALL: dict[str, Any] = {
    "batch_tokens": 1 << 13,
    "seq_len": 256,
    "micro_batch": 32,
    "loader": "window",
    "save_seconds": 60.0,
}
_SIZES: dict[str, dict[str, Any]] = {
    "nano": {**_SMALL, "tokens": 2_000_000, "eval_every": 60, "eval_tokens": 1 << 16},
    "micro": {**_SMALL, "tokens": 20_000_000, "eval_every": 200, "eval_tokens": 1 << 18},
    "45m": {**_PAPER, "tokens": 1_800_000_000, "batch_tokens": 1 << 17, "micro_batch": 16},
    "180m": {**_PAPER, "tokens": 10_900_000_000, "batch_tokens": 1 << 19, "micro_batch": 8},
}


def recipe(name: str, **changes: Any) -> PretrainRecipe:
    """A recipe by name.

    Args:
        name: name of a preset; ``nano`` and ``micro`` are short for those of KLA.
        changes: fields of ``PretrainRecipe`` to override.
    """
    full = full_name(name)
    return PretrainRecipe(**{"model": full, **_SIZES[full.rpartition("-")[2]], **changes})
