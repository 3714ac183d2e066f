"""From scores to verdicts: whether a text is foreign, and whether confidence is deserved.

Detection, with scores that are higher for foreign windows: AUROC, and the false-positive rate at a
true-positive rate of 95 % (FPR95). Calibration, over single predictions: the expected calibration
error (ECE), and the area under the risk-coverage curve (AURC).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kalman_attention._extras import library
from kalman_attention.evaluation.scores import Array, Scores

BINS = 15
"""Bins of equal width for the calibration error."""


_LIBRARIES = ("sklearn", "torchmetrics")


def require_libraries() -> None:
    """Raise, with the way to install it, unless all that this module needs is there."""
    for name in _LIBRARIES:
        library(name, "score")


class Mahalanobis:
    """Distance of hidden states from those of a reference text.

    The covariance is shrunk towards a multiple of the identity by as much as Ledoit and Wolf's
    estimate says: windows are often fewer than channels.

    Args:
        reference: hidden states, one row per window of the reference, ``[n, width]``.
    """

    def __init__(self, reference: Array) -> None:
        if len(reference) < 2:
            raise ValueError(
                f"{len(reference)} window of reference text has no covariance: give a longer "
                "reference, or make windows shorter."
            )
        covariance = library("sklearn.covariance", "score")
        self._fitted = covariance.LedoitWolf().fit(reference)

    def __call__(self, hidden: Array) -> Array:
        """Distances of rows ``[n, width]``, ``[n]``."""
        found: Array = np.sqrt(self._fitted.mahalanobis(hidden))
        return found


class Detection(NamedTuple):
    """How well a score tells foreign windows from those of the reference.

    Attributes:
        auroc: probability that a foreign window has the higher score; 0.5 is chance.
        fpr95: share of reference windows above the threshold that 95 % of the foreign ones reach.
        flagged: share of the foreign windows beyond 95 % of the reference windows.
    """

    auroc: float
    fpr95: float
    flagged: float


def detect(reference: Array, foreign: Array) -> Detection:
    """How well a score separates two sets of windows.

    Args:
        reference: scores of windows that are known, ``[n]``.
        foreign: scores of windows that should be higher, ``[m]``.
    """
    metrics = library("sklearn.metrics", "score")
    scores = np.concatenate([reference, foreign])
    labels = np.repeat([0, 1], [len(reference), len(foreign)])
    fpr, tpr, _ = metrics.roc_curve(labels, scores, drop_intermediate=False)
    return Detection(
        auroc=float(metrics.roc_auc_score(labels, scores)),
        fpr95=float(fpr[np.argmax(tpr >= 0.95)]),
        flagged=float((foreign > _limit(reference)).mean()),
    )


class Reference:
    """What is usual: windows of a text of the kind that the model knows.

    The first half of them fits the distance of hidden states, the second half, which it has not
    seen, is what other windows are compared with.

    Args:
        scores: of the windows of the reference text.
    """

    def __init__(self, scores: Scores) -> None:
        half = len(scores.hidden) // 2
        self.distance = Mahalanobis(scores.hidden[:half])
        self.fitted, self.held_out = half, len(scores.hidden) - half
        self.usual = {
            name: values[half:][np.isfinite(values[half:])]
            for name, values in self.windows(scores).items()
        }

    def windows(self, scores: Scores) -> dict[str, Array]:
        """All scores of windows, the distance from the reference among them, ``[n]`` each."""
        found = scores.of_windows()
        distance = np.where(np.isnan(found["perplexity"]), np.nan, self.distance(scores.hidden))
        return {**found, "mahalanobis": distance}

    def detect(self, windows: dict[str, Array]) -> dict[str, Detection]:
        """How well each score tells windows from those of the reference."""
        return {
            name: detect(_rising(name, self.usual[name]), _rising(name, values[values == values]))
            for name, values in windows.items()
        }

    def unusual(self, windows: dict[str, Array]) -> dict[str, NDArray[np.bool_]]:
        """Windows beyond 95 % of those of the reference, by score, ``[n]`` each."""
        return {
            name: _rising(name, values) > _limit(_rising(name, self.usual[name]))
            for name, values in windows.items()
        }

    def thresholds(self) -> dict[str, float]:
        """The value of each score that 95 % of the reference windows do not go beyond."""
        return {
            name: float(_rising(name, _limit(_rising(name, values))))
            for name, values in self.usual.items()
        }


def _rising(name: str, values: Any) -> Any:
    """Scores so that foreign windows should have the higher ones: a sure model is at home."""
    return -values if name == "max_prob" else values


def _limit(usual: Array) -> float:
    return float(np.quantile(usual, 0.95, method="higher"))


class Calibration(NamedTuple):
    """Whether confidence is worth something, over single predictions.

    Attributes:
        ece: mean distance between confidence and accuracy, over bins of confidence.
        aurc: mean error rate among the most confident predictions, over all shares of them; small
            if the model errs where it is unsure.
        accuracy: share of right predictions.
        tokens: how many predictions there were.
    """

    ece: float
    aurc: float
    accuracy: float
    tokens: int


def calibrate(confidence: Array, correct: Array) -> Calibration:
    """Calibration of predictions.

    Args:
        confidence: probability of the most likely token, NaN where there is none; any shape.
        correct: 1 where it was the right one, 0 elsewhere; of the same shape.
    """
    known = np.isfinite(confidence)
    confidence, correct = confidence[known], correct[known]
    return Calibration(
        ece=_ece(confidence, correct),
        aurc=aurc(confidence, correct),
        accuracy=float(correct.mean()),
        tokens=len(correct),
    )


def aurc(confidence: Array, correct: Array) -> float:
    """Area under the risk-coverage curve; predictions of equal confidence come in random order.

    Args:
        confidence: of each prediction, ``[n]``.
        correct: 1 where it was right, 0 elsewhere, ``[n]``.
    """
    # What the order of ties would decide is taken as its mean: each of them errs a little.
    _, place, counts = np.unique(confidence, return_inverse=True, return_counts=True)
    errors = (np.bincount(place, 1.0 - correct) / counts)[place]
    ordered = errors[np.argsort(-confidence, kind="stable")]
    return float((np.cumsum(ordered) / np.arange(1, len(ordered) + 1)).mean())


def _ece(confidence: Array, correct: Array) -> float:
    import torch

    functional = library("torchmetrics.functional.classification", "score")
    found = functional.binary_calibration_error(
        torch.from_numpy(confidence), torch.from_numpy(correct).long(), n_bins=BINS, norm="l1"
    )
    return float(found)
