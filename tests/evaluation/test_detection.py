"""Verdicts against counting by hand."""

import importlib
import itertools

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("torchmetrics")

from kalman_attention.evaluation import detection
from kalman_attention.evaluation.detection import (
    Mahalanobis,
    Reference,
    aurc,
    calibrate,
    detect,
)
from kalman_attention.evaluation.scores import cut, score_windows
from tests.models.small import small, text


def test_auroc_is_the_share_of_pairs():
    rng = np.random.default_rng(0)
    known, foreign = rng.normal(size=30), rng.normal(1.0, size=20)
    pairs = [(f > k) for k, f in itertools.product(known, foreign)]
    found = detect(known, foreign)
    assert found.auroc == pytest.approx(np.mean(pairs))
    threshold = np.sort(foreign)[1]  # 19 of 20 reach it
    assert found.fpr95 == pytest.approx((known >= threshold).mean())
    assert found.flagged == pytest.approx((foreign > np.sort(known)[28]).mean())


def test_extremes():
    low, high = np.arange(20.0), np.arange(20.0) + 100
    assert detect(low, high) == (1.0, 0.0, 1.0)
    assert detect(high, low)[:2] == (0.0, 1.0)


def test_ece_over_bins():
    confidence = np.array([0.12, 0.12, 0.81, 0.81, 0.95, np.nan])
    correct = np.array([0.0, 1.0, 1.0, 0.0, 1.0, np.nan])
    found = calibrate(confidence, correct)
    # Bins of 1/15: (0.12, 0.12), (0.81, 0.81), (0.95); weights 2/5, 2/5, 1/5.
    assert found.ece == pytest.approx(0.4 * abs(0.5 - 0.12) + 0.4 * 0.31 + 0.2 * 0.05, rel=1e-5)
    assert found.accuracy == pytest.approx(0.6)
    assert found.tokens == 5


def test_aurc_is_the_mean_over_orders_of_ties():
    confidence, correct = np.array([0.9, 0.5, 0.5, 0.1]), np.array([1.0, 0.0, 1.0, 0.0])

    def area(order):
        errors = 1.0 - correct[list(order)]
        return np.mean(np.cumsum(errors) / np.arange(1, 5))

    assert aurc(confidence, correct) == pytest.approx((area([0, 1, 2, 3]) + area([0, 2, 1, 3])) / 2)
    assert aurc(confidence, np.ones(4)) == 0.0
    assert aurc(confidence, np.zeros(4)) == 1.0
    assert aurc(confidence, np.array([1.0, 1, 1, 0])) < aurc(confidence, np.array([0.0, 1, 1, 1]))


def test_mahalanobis_knows_the_shape_of_the_cloud():
    rng = np.random.default_rng(1)
    cloud = rng.normal(size=(4000, 2)) * [10.0, 0.1] + [5.0, -3.0]
    distance = Mahalanobis(cloud)
    far, near = distance(np.array([[5.0, -2.0], [15.0, -3.0]]))
    assert near == pytest.approx(1.0, rel=0.1)
    assert far > 3 * near  # a short way, against the grain
    with pytest.raises(ValueError, match="longer reference"):
        Mahalanobis(cloud[:1])


def test_reference_is_half_fitted_half_held_out():
    model = small().eval()
    scores = score_windows(model, cut(text(1, 85)[0].tolist(), 0, 8), carry=True)
    reference = Reference(scores)
    assert (reference.fitted, reference.held_out) == (5, 6)
    assert len(reference.usual["perplexity"]) == 6
    windows = reference.windows(scores)
    np.testing.assert_allclose(reference.distance(scores.hidden)[:5], windows["mahalanobis"][:5])
    limits, marks = reference.thresholds(), reference.unusual(windows)
    for name, values in windows.items():
        beyond = values < limits[name] if name == "max_prob" else values > limits[name]
        np.testing.assert_array_equal(marks[name], beyond)
        assert not beyond[5:].any()  # the largest of six is the limit itself
    assert set(reference.detect(windows)) == set(windows)


def test_the_error_names_the_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"scikit-learn.*kalman_attention\[score\]"):
        detection.require_libraries()
