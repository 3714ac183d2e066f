r"""Metrics of the synthetic tasks, accumulated batch by batch.

MAD's accuracy is a macro average: the recall of each class, averaged over the classes that occur
among targets or predictions at the scored positions of one batch. A class that is predicted but
never correct lowers it. The value for a dataset is the mean over batches, weighted by their sizes,
so it depends slightly on the batch size; plain token accuracy does not.

    >>> metrics = metrics_for(task)
    >>> for inputs, targets in batches:
    ...     predicted = predicted_tokens(model, inputs)
    ...     for metric in metrics.values():
    ...         metric.update(predicted, targets)
    >>> scores = {name: metric.compute() for name, metric in metrics.items()}
"""

from typing import Protocol

import torch
from torch import Tensor

from kalman_attention.models.autoencoder import Autoencoder
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.uncertainty import predictions
from kalman_attention.tasks.mad.copying import Compression
from kalman_attention.tasks.permutations import Permutations
from kalman_attention.tasks.task import IGNORE, Task


class Metric(Protocol):
    """A metric that is updated batch by batch."""

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        """Count a batch: predicted tokens and targets, ``[B, T]`` each."""

    def compute(self) -> float:
        """The value over all batches so far; NaN before the first."""


class MacroAccuracy:
    """MAD's accuracy: class-averaged recall per batch, then the mean over batches by size.

    A batch in which nothing is scored does not count.
    """

    def __init__(self) -> None:
        self._sum, self._rows = 0.0, 0

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        """Count a batch: predicted tokens and targets, ``[B, T]`` each."""
        _check(predicted, targets)
        scored = targets != IGNORE
        if not bool(scored.any()):
            return
        self._sum += len(targets) * macro_accuracy(predicted[scored], targets[scored])
        self._rows += len(targets)

    def compute(self) -> float:
        """The value over all batches so far; NaN before the first."""
        return _ratio(self._sum, self._rows)


class TokenAccuracy:
    """Share of scored positions that are correct.

    Args:
        skip: number of initial positions that do not count: 1 leaves out BOS.
        ignored: another target that does not count, such as a constant one.
    """

    def __init__(self, *, skip: int = 0, ignored: int | None = None) -> None:
        self.skip, self.ignored = skip, ignored
        self._right, self._scored = 0, 0

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        """Count a batch: predicted tokens and targets, ``[B, T]`` each."""
        _check(predicted, targets)
        predicted, targets = predicted[:, self.skip :], targets[:, self.skip :]
        scored = targets != IGNORE
        if self.ignored is not None:
            scored &= targets != self.ignored
        self._right += int(((predicted == targets) & scored).sum())
        self._scored += int(scored.sum())

    def compute(self) -> float:
        """The value over all batches so far; NaN before the first."""
        return _ratio(self._right, self._scored)


class SequenceAccuracy:
    """Share of sequences that are correct at every scored position.

    Sequences without scored positions do not count.

    Args:
        skip: number of initial positions that do not count: 1 leaves out BOS.
    """

    def __init__(self, *, skip: int = 0) -> None:
        self.skip = skip
        self._right, self._rows = 0, 0

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        """Count a batch: predicted tokens and targets, ``[B, T]`` each."""
        _check(predicted, targets)
        predicted, targets = predicted[:, self.skip :], targets[:, self.skip :]
        scored = targets != IGNORE
        right = ((predicted == targets) | ~scored).all(1) & scored.any(1)
        self._right += int(right.sum())
        self._rows += int(scored.any(1).sum())

    def compute(self) -> float:
        """The value over all batches so far; NaN before the first."""
        return _ratio(self._right, self._rows)


class PositionAccuracy:
    """Token accuracy at every position; all batches must have the same length.

    Args:
        skip: number of initial positions that do not count: 1 leaves out BOS.
    """

    def __init__(self, *, skip: int = 0) -> None:
        self.skip = skip
        self._counts: Tensor | None = None

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        """Count a batch: predicted tokens and targets, ``[B, T]`` each."""
        _check(predicted, targets)
        predicted, targets = predicted[:, self.skip :], targets[:, self.skip :]
        scored = targets != IGNORE
        right = (predicted == targets) & scored
        counts = torch.stack([right.sum(0), scored.sum(0)]).cpu()
        self._counts = counts if self._counts is None else self._counts + counts

    def positions(self) -> list[float]:
        """Accuracy at each position; NaN where nothing is scored."""
        if self._counts is None:
            return []
        return [_ratio(right, scored) for right, scored in self._counts.t().tolist()]

    def compute(self) -> float:
        """Accuracy at the last position."""
        found = self.positions()
        return found[-1] if found else float("nan")


def macro_accuracy(predicted: Tensor, targets: Tensor) -> float:
    """Recall averaged over the classes in targets or predictions, over all positions ``[n]``."""
    classes = 1 + int(torch.maximum(predicted.max(), targets.max()))
    right = torch.bincount(targets[predicted == targets], minlength=classes)
    asked = torch.bincount(targets, minlength=classes)
    present = (asked + torch.bincount(predicted, minlength=classes)) > 0
    recall = right.double() / asked.clamp(min=1)
    return float(recall.sum() / present.sum())


def metrics_for(task: Task) -> dict[str, Metric]:
    """New metrics for a task, by name; tables report the first one.

    Every task has ``macro_accuracy`` (MAD's) and ``token_accuracy``. Compression adds
    ``content_accuracy``, without the constant last token. Group products report
    ``sequence_accuracy`` first and add accuracies without BOS and at the last position.
    """
    both: dict[str, Metric] = {
        "macro_accuracy": MacroAccuracy(),
        "token_accuracy": TokenAccuracy(),
    }
    if isinstance(task, Compression):
        both["content_accuracy"] = TokenAccuracy(ignored=task.vocab_size - 1)
    if isinstance(task, Permutations):
        skip = int(task.bos)
        return {
            "sequence_accuracy": SequenceAccuracy(),
            "sequence_accuracy_without_bos": SequenceAccuracy(skip=skip),
            **both,
            "token_accuracy_without_bos": TokenAccuracy(skip=skip),
            "last_position_accuracy": PositionAccuracy(skip=skip),
        }
    return both


@torch.no_grad()
def predicted_tokens(
    model: LanguageModel | Autoencoder,
    inputs: Tensor,
    *,
    num_samples: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The most likely token of the whole vocabulary at every position.

    Args:
        model: a language model, or the autoencoder for compression.
        inputs: ``[B, T]``.
        num_samples: number of posterior samples to average over (KLA+); 0 decodes the posterior
            mean.
        generator: source of randomness.

    Returns:
        ``[B, T]`` int64.
    """
    if num_samples == 0:
        logits: Tensor = model(inputs).logits
        return logits.argmax(-1)
    parts = predictions(model, model.read(inputs), num_samples=num_samples, generator=generator)
    return torch.cat([part.log_probs.argmax(-1) for part in parts], 1)


def _check(predicted: Tensor, targets: Tensor) -> None:
    if predicted.shape != targets.shape or targets.dim() != 2:
        raise ValueError(
            f"predicted and targets must both be [B, T] tokens, got {list(predicted.shape)} and "
            f"{list(targets.shape)}. Apply argmax(-1) to logits first."
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
