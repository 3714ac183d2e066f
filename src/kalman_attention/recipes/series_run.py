"""Training of a series model on three splits, for the experiments on series.

Weights are chosen on the validation set; the test set is used once, with these weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention.evaluation.series import class_scores, gaussian_scores
from kalman_attention.models.series import SeriesModel, SeriesOutput
from kalman_attention.models.series_config import SeriesConfig
from kalman_attention.train.config import TrainConfig
from kalman_attention.train.data import TensorBatches
from kalman_attention.train.loop import fit
from kalman_attention.train.objective import Loss
from kalman_attention.train.optim import matrix_decay_groups
from kalman_attention.train.snapshot import load_weights


class Series(NamedTuple):
    """Series of a split, padded to one length; fields as for ``SeriesModel.forward``.

    Attributes:
        values: ``[n, T, C]``, or images ``[n, T, S, S]``.
        observed: which of them were observed, ``[n, T, C]``, or ``[n, T]`` for images.
        times: ``[n, T]``.
        mask: ``[n, T]``, False for padding.
        targets: ``[n, T, K]``, or classes ``[n]``.
        asked: which targets count, of the same shape.
    """

    values: Tensor
    observed: Tensor
    times: Tensor
    mask: Tensor
    targets: Tensor
    asked: Tensor

    def cut(self) -> "Series":
        """The same without the instants at the end that are padding in every row."""
        length = int(self.mask.any(0).nonzero().max()) + 1
        return Series(*(x if x.dim() == 1 else x[:, :length] for x in self))


class Splits(NamedTuple):
    """Data for training, for choosing weights, and for the reported scores."""

    train: Series
    validation: Series
    test: Series


def series_loss(model: nn.Module, batch: Any, generator: torch.Generator) -> Tensor:
    """Negative log-likelihood of the targets: Gaussian without its constant, or of classes.

    Paths to the logits are trained to predict by themselves: trained on their mean, the path that
    learns faster leaves nothing to the other.
    """
    given = Series(*batch).cut()
    found: SeriesOutput = model(*given[:4])
    if found.variance is None:
        paths = found.mean.unsqueeze(0) if found.paths is None else found.paths
        return nn.functional.cross_entropy(paths.flatten(0, 1), given.targets.repeat(len(paths)))
    mean, variance, targets = _asked(given, found.mean, found.variance, given.targets)
    return nn.functional.gaussian_nll_loss(mean, targets, variance)


@torch.no_grad()
def series_scores(model: nn.Module, given: Series, batch_size: int) -> dict[str, float]:
    """Scores of a model in evaluation mode over a whole split."""
    found: list[tuple[Tensor, ...]] = []
    for batch in _batches(given, batch_size):
        out: SeriesOutput = model(*batch[:4])
        if out.variance is None:
            found.append((out.mean.softmax(-1)[:, 1], batch.targets))
        else:
            found.append(_asked(batch, out.mean, out.variance, batch.targets))
    joined = [torch.cat(parts) for parts in zip(*found, strict=True)]
    return class_scores(*joined) if len(joined) == 2 else gaussian_scores(*joined)


def _asked(given: Series, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x[given.asked] for x in tensors)


def _batches(given: Series, batch_size: int) -> Iterator[Series]:
    for start in range(0, len(given.times), batch_size):
        yield Series(*(x[start : start + batch_size] for x in given)).cut()


def train_series(
    config: SeriesConfig,
    training: TrainConfig,
    data: Splits,
    folder: Path,
    *,
    batch_size: int,
    loss: Loss = series_loss,
    about: Mapping[str, Any],
    show: bool,
) -> dict[str, Any]:
    """Train a model, or resume training; see ``cell.Run``.

    Args:
        config: options of the model; the seed of the training is also that of its initial weights.
        training: options of the training loop, with a ``monitor`` among the scores; weight decay
            applies to matrices only.
        data: the three splits.
        folder: folder of the run.
        batch_size: series per update.
        loss: the loss to minimise.
        about: what else defines the run.
        show: whether to print progress.

    Returns:
        The content of the result file: scores on the test set, and those of the best evaluation.
    """
    torch.manual_seed(training.seed)
    model = SeriesModel(config)
    options: dict[str, Any] = {"lr": training.lr, "weight_decay": training.weight_decay}
    options |= {"betas": training.betas, "eps": training.eps}
    result = fit(
        model,
        TensorBatches(data.train, batch_size, training.seed),
        loss,
        training,
        folder=folder,
        evaluate=lambda model: series_scores(model, data.validation, batch_size),
        groups=matrix_decay_groups(model, **options),
        about={"model": config.to_dict(), "batch_size": batch_size, **about},
        progress=show,
    )
    assert result.best is not None
    load_weights(model, result.best.folder)
    records = result.history
    curve = [r for r in records if r["kind"] == "eval"]
    return {
        "metrics": series_scores(model.eval(), data.test, batch_size),
        "validation": result.best.metrics,
        "best_step": result.best.step,
        "steps": result.step,
        "ended_by": result.reason,
        "seconds": records[-1]["seconds"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": [{k: v for k, v in record.items() if k != "kind"} for record in curve],
    }


def over_seeds(
    results: Sequence[dict[str, Any]], metric: str, form: str, *, factor: float = 1.0, **labels: str
) -> str:
    """Mean, standard deviation and number of a test metric over the runs with the given labels.

    Args:
        results: results of all runs.
        metric: name of the metric.
        form: format of a number, such as ``".3f"``.
        factor: factor that numbers are multiplied by.
        **labels: labels of the runs.
    """
    values = [
        factor * r["metrics"][metric]
        for r in results
        if all(r["labels"].get(name) == word for name, word in labels.items())
    ]
    if not values:
        return "-"
    if len(values) == 1:
        return format(values[0], form)
    return f"{mean(values):{form}} +- {stdev(values):{form}} ({len(values)} runs)"
