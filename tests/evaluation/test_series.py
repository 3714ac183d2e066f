"""Scores of series: against closed forms."""

import math

import pytest
import torch

pytest.importorskip("scoringrules")
pytest.importorskip("sklearn")
pytest.importorskip("torchmetrics")

from kalman_attention.evaluation.series import class_scores, gaussian_scores


def test_gaussian_scores_of_a_true_model():
    g = torch.Generator().manual_seed(0)
    mean, variance = torch.randn(40_000, generator=g), torch.rand(40_000, generator=g) + 0.5
    targets = mean + variance.sqrt() * torch.randn(40_000, generator=g)
    found = gaussian_scores(mean, variance, targets)
    assert found["coverage"] == pytest.approx(0.95, abs=0.005)
    assert found["mse"] == pytest.approx(variance.mean().item(), rel=0.03)
    entropy = 0.5 * (math.log(2 * math.pi) + variance.log().mean().item() + 1.0)
    assert found["nll"] == pytest.approx(entropy, rel=0.01)
    # A normal forecast that is true has a score of deviation / sqrt(pi) on average.
    assert found["crps"] == pytest.approx(
        variance.sqrt().mean().item() / math.sqrt(math.pi), rel=0.02
    )


def test_a_forecast_that_is_too_sure_covers_less():
    targets = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    found = gaussian_scores(torch.zeros_like(targets), torch.full_like(targets, 0.25), targets)
    assert found["coverage"] == pytest.approx(math.erf(0.98 / math.sqrt(2)), abs=0.01)


def test_class_scores():
    labels = torch.tensor([0, 0, 1, 1])
    assert class_scores(torch.tensor([0.1, 0.2, 0.8, 0.9]), labels)["auroc"] == 1.0
    found = class_scores(torch.tensor([0.1, 0.8, 0.2, 0.9]), labels)
    assert found["auroc"] == 0.75
    assert found["auprc"] == pytest.approx((1.0 + 2 / 3) / 2)
    probability = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    drawn = torch.rand(20_000, generator=torch.Generator().manual_seed(1))
    sure = class_scores(probability, (drawn < probability).long())
    assert sure["ece"] < 0.015
    assert class_scores(probability.square(), (drawn < probability).long())["ece"] > 0.1


def test_one_class_is_no_ranking():
    with pytest.raises(ValueError, match="examples of both"):
        class_scores(torch.tensor([0.1, 0.2]), torch.tensor([1, 1]))
