"""Scores of predictions of series: of Gaussian forecasts, and of class probabilities.

The scores are computed by libraries (``pip install 'kalman_attention[series]'``); this module
chooses the positions that count.
"""

import torch
from torch import Tensor, nn

from kalman_attention._extras import library

_Z95 = 1.959963984540054  # 95 % of a standard normal distribution lie within +- this


def gaussian_scores(mean: Tensor, variance: Tensor, targets: Tensor) -> dict[str, float]:
    """Scores of Gaussian predictions, one number each.

    Args:
        mean: mean of the predictions, of any shape, with at least one number.
        variance: variance of the predictions, of the same shape.
        targets: the true values, of the same shape.

    Returns:
        ``mse``; ``nll`` in nats, with its constant; ``crps``, the continuous ranked probability
        score, in the units of the targets; ``coverage``, the share of targets within the central
        95 % of their prediction.
    """
    rules = library("scoringrules", "series")
    mean, variance, targets = (x.double().flatten() for x in (mean, variance, targets))
    deviation = variance.sqrt()
    nll = nn.functional.gaussian_nll_loss(mean, targets, variance, full=True, eps=1e-12)
    crps = rules.crps_normal(targets.numpy(), mean.numpy(), deviation.numpy())
    return {
        "mse": nn.functional.mse_loss(mean, targets).item(),
        "nll": nll.item(),
        "crps": float(crps.mean()),
        "coverage": ((targets - mean).abs() <= _Z95 * deviation).double().mean().item(),
    }


def class_scores(probability: Tensor, labels: Tensor) -> dict[str, float]:
    """Scores of the probabilities of a positive class.

    Args:
        probability: probability of class 1, ``[n]``.
        labels: 0 or 1, ``[n]``; both must occur.

    Returns:
        ``auroc``; ``auprc``, the average precision; ``ece``, the expected calibration error over
        15 bins of equal width; ``nll`` in nats.
    """
    metrics = library("sklearn.metrics", "series")
    calibration = library(
        "torchmetrics.functional.classification", "series"
    ).binary_calibration_error
    p, y = probability.double().contiguous().numpy(), labels.numpy()
    if len(set(y.tolist())) < 2:
        raise ValueError("all labels are equal: ranking two classes needs examples of both.")
    return {
        "auroc": float(metrics.roc_auc_score(y, p)),
        "auprc": float(metrics.average_precision_score(y, p)),
        "ece": float(calibration(torch.from_numpy(p), labels, n_bins=15)),
        "nll": float(metrics.log_loss(y, p)),
    }
