"""Losses and evaluations: plain callables, and those of language models."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from kalman_attention.models.language_model import LanguageModel
from kalman_attention.parallel.batch import piece

Metrics: TypeAlias = Mapping[str, float | Tensor]
Evaluate: TypeAlias = Callable[[nn.Module], Mapping[str, float]]
"""Computes metrics of a model, which is in evaluation mode and records no gradients."""


class Loss(Protocol):
    """A loss to minimise."""

    def __call__(
        self, model: nn.Module, batch: Any, generator: torch.Generator
    ) -> Tensor | tuple[Tensor, Metrics]:
        """The loss of a batch, and optionally metrics to log.

        Args:
            model: the model, in training mode.
            batch: a batch of the data.
            generator: random generator on the device of the model, seeded for this batch.
        """


def token_loss(
    kind: Literal["mean", "marginal"] = "mean", *, num_samples: int = 10, ignore_index: int = -100
) -> Loss:
    """The training losses of ``LanguageModel``.

    Args:
        kind: ``"mean"``, cross-entropy of the posterior mean, or ``"marginal"`` (KLA+).
        num_samples: posterior samples for the marginal likelihood.
        ignore_index: target that does not count.

    Returns:
        A loss for batches of tokens ``[B, T + 1]``, or for tuples that start with inputs and
        targets, ``[B, T]`` each.
    """
    return TokenLoss(kind, num_samples, ignore_index)


@dataclass(frozen=True)
class TokenLoss:
    """The result of ``token_loss``; it can also be divided over ranks and split in time."""

    kind: Literal["mean", "marginal"]
    num_samples: int
    ignore_index: int

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Tensor:
        """The mean over all targets that count."""
        return self._loss(model, batch, generator, "mean")

    def total(self, model: nn.Module, batch: Any, generator: torch.Generator) -> tuple[Tensor, int]:
        """The sum over all targets that count, and their number."""
        _, targets = inputs_and_targets(batch)
        count = int((targets != self.ignore_index).sum())
        return self._loss(model, batch, generator, "sum"), count

    def piece(self, batch: Any, index: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets for one of the ``count`` ranks that share the sequences."""
        inputs, targets = (piece(x, index, count) for x in inputs_and_targets(batch))
        return inputs, targets

    def _loss(
        self,
        model: nn.Module,
        batch: Any,
        generator: torch.Generator,
        reduction: Literal["mean", "sum"],
    ) -> Tensor:
        inputs, targets = inputs_and_targets(batch)
        return cast(LanguageModel, model).loss(
            inputs,
            targets,
            kind=self.kind,
            num_samples=self.num_samples,
            generator=generator,
            ignore_index=self.ignore_index,
            reduction=reduction,
        )


def token_evaluation(batches: Iterable[Any], *, ignore_index: int = -100) -> Evaluate:
    """Loss and accuracy of a ``LanguageModel`` on given batches, by its posterior mean.

    Args:
        batches: as for ``token_loss``; iterated over at each evaluation.
        ignore_index: target that does not count.

    Returns:
        An evaluation with ``loss`` (nats per token that counts) and ``accuracy`` (of those tokens).
    """

    def evaluate(model: nn.Module) -> dict[str, float]:
        total, right, count = 0.0, 0, 0
        for batch in batches:
            inputs, targets = inputs_and_targets(batch)
            logits = model(inputs).logits.flatten(0, 1).float()
            flat = targets.flatten()
            total += nn.functional.cross_entropy(
                logits, flat, ignore_index=ignore_index, reduction="sum"
            ).item()
            counted = flat != ignore_index
            right += int(((logits.argmax(-1) == flat) & counted).sum())
            count += int(counted.sum())
        if count == 0:
            raise ValueError("nothing to evaluate: no batch has a target that counts.")
        return {"loss": total / count, "accuracy": right / count}

    return evaluate


def inputs_and_targets(batch: Any) -> tuple[Tensor, Tensor]:
    """The first two items of a batch, or tokens ``[B, T + 1]`` split into inputs and targets."""
    if isinstance(batch, Tensor):
        return batch[:, :-1], batch[:, 1:]
    if len(batch) == 1:
        return inputs_and_targets(batch[0])
    inputs, targets, *_ = batch
    return inputs, targets
