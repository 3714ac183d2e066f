"""Metrics of the synthetic tasks: by hand, by another library, and batch by batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention.evaluation.synthetic import (
    MacroAccuracy,
    PositionAccuracy,
    SequenceAccuracy,
    TokenAccuracy,
    metrics_for,
    predicted_tokens,
)
from kalman_attention.tasks.registry import TASKS, make_task
from tests.models.small import small, text

_ = -100


def score(metric, *batches):
    for predicted, targets in batches:
        metric.update(torch.tensor(predicted), torch.tensor(targets))
    return metric.compute()


def slow_macro(predicted, targets):
    pairs = [
        (p, t)
        for row, asked in zip(predicted, targets, strict=True)
        for p, t in zip(row, asked, strict=True)
        if t != _
    ]
    classes = {c for pair in pairs for c in pair}
    recalls = []
    for c in classes:
        asked = [p for p, t in pairs if t == c]
        recalls.append(asked.count(c) / len(asked) if asked else 0.0)
    return sum(recalls) / len(recalls)


def test_macro_accuracy_by_hand():
    # Recall of class 1 is 2 / 3 and of class 2 is 1; class 5 is predicted and never asked for.
    assert score(MacroAccuracy(), ([[1, 1, 5, 2, 7]], [[1, 1, 1, 2, _]])) == pytest.approx(5 / 9)
    # One stray prediction among eight perfect classes costs a ninth.
    targets = [[*range(8), 0]]
    assert score(MacroAccuracy(), ([[*range(8), 9]], targets)) == pytest.approx(7.5 / 9)
    assert score(TokenAccuracy(), ([[*range(8), 9]], targets)) == pytest.approx(8 / 9)


def test_macro_accuracy_is_the_mean_over_batches_by_size():
    right, wrong = ([[3], [3], [3]], [[3], [3], [3]]), ([[4]], [[3]])
    assert score(MacroAccuracy(), right, wrong) == pytest.approx(3 / 4)
    both = ([[3], [3], [3], [4]], [[3], [3], [3], [3]])
    assert score(MacroAccuracy(), both) == pytest.approx(0.75 / 2)  # batches matter
    assert score(MacroAccuracy(), right, ([[1]], [[_]])) == 1.0


tokens = st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(predicted=tokens, hidden=st.integers(0, 2**24 - 1), seed=st.integers(0, 10**6))
def test_macro_accuracy_is_what_its_words_say(predicted, hidden, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (len(predicted), 4)
    targets = torch.randint(6, shape, generator=generator)
    keep = torch.tensor([hidden >> i & 1 for i in range(4 * len(predicted))]).view(shape)
    targets = torch.where(keep.bool(), targets, _).tolist()
    if any(t != _ for row in targets for t in row):
        found = score(MacroAccuracy(), (predicted, targets))
        assert found == pytest.approx(slow_macro(predicted, targets))


@pytest.mark.parametrize("seed", range(5))
def test_macro_accuracy_is_that_of_torchmetrics(seed):
    functional = pytest.importorskip("torchmetrics.functional.classification")
    generator = torch.Generator().manual_seed(seed)
    metric, total = MacroAccuracy(), 0.0
    for rows in (7, 7, 3):
        predicted = torch.randint(16, (rows, 9), generator=generator)
        targets = torch.randint(8, 16, (rows, 9), generator=generator)
        right = torch.rand(targets.shape, generator=generator) < 0.6
        predicted = torch.where(right, targets, predicted)
        targets = torch.where(torch.rand(targets.shape, generator=generator) < 0.3, targets, _)
        metric.update(predicted, targets)
        total += rows * functional.multiclass_accuracy(
            predicted, targets, num_classes=16, ignore_index=_
        )
    assert metric.compute() == pytest.approx(float(total) / 17, abs=1e-6)


def test_token_and_sequence_accuracy():
    targets = [[9, 1, 2], [9, 3, 4], [9, _, 5]]
    predicted = [[9, 1, 2], [9, 3, 0], [0, 7, 5]]
    batches = (predicted[:1], targets[:1]), (predicted[1:], targets[1:])
    assert score(TokenAccuracy(), *batches) == pytest.approx(6 / 8)
    assert score(TokenAccuracy(skip=1), *batches) == pytest.approx(4 / 5)
    assert score(TokenAccuracy(ignored=9), *batches) == pytest.approx(4 / 5)
    assert score(SequenceAccuracy(), *batches) == pytest.approx(1 / 3)
    assert score(SequenceAccuracy(skip=1), *batches) == pytest.approx(2 / 3)
    assert score(SequenceAccuracy(), ([[1], [2]], [[1], [_]])) == 1.0


def test_position_accuracy():
    metric = PositionAccuracy(skip=1)
    assert math.isnan(metric.compute())
    assert metric.positions() == []
    score(metric, ([[9, 1, 2, 5]], [[9, 1, 3, _]]), ([[9, 1, 2, 5]], [[9, 0, 2, _]]))
    assert metric.positions()[:2] == [0.5, 0.5]
    assert math.isnan(metric.positions()[2])


def test_nothing_scored_is_no_number():
    for metric in (MacroAccuracy(), TokenAccuracy(), SequenceAccuracy()):
        assert math.isnan(score(metric, ([[1]], [[_]])))


@pytest.mark.parametrize("name", TASKS)
def test_right_answers_score_one_in_every_metric(name):
    task = make_task(name, **TASKS[name].SHORT)
    rows = task.generate("test", count=min(30, task.size("test")))
    metrics = metrics_for(task)
    assert {"macro_accuracy", "token_accuracy"} <= set(metrics)
    for metric in metrics.values():
        for i in (0, 10):
            metric.update(rows.targets[i : i + 10].clamp(min=0), rows.targets[i : i + 10])
        assert metric.compute() == 1.0


def test_compression_also_scores_content_alone():
    task = make_task("compression")
    rows = task.generate("test", count=200)
    predicted = torch.zeros_like(rows.targets)
    predicted[:, -1] = 15
    metrics = metrics_for(task)
    for metric in metrics.values():
        metric.update(predicted, rows.targets)
    content = metrics["content_accuracy"].compute()
    assert content == pytest.approx(1 / 15, abs=0.02)
    assert metrics["token_accuracy"].compute() == pytest.approx((31 * content + 1) / 32)
    assert metrics["macro_accuracy"].compute() == pytest.approx(2 / 16)
    assert task.chance == 2 / 16


def test_chance_is_what_a_guess_scores():
    for name in ("recall", "noisy_recall", "selective_copying", "memorization", "a5"):
        task = make_task(name, test_size=2000, train_size=100)
        targets = task.generate("test").targets
        scored = targets[:, 1:] if name == "a5" else targets
        answers = scored[scored != _].unique()
        generator = torch.Generator().manual_seed(0)
        guess = answers[torch.randint(len(answers), scored.shape, generator=generator)]
        metric = TokenAccuracy()
        metric.update(guess, scored)
        assert metric.compute() == pytest.approx(task.chance, rel=0.1), name


def test_predicted_tokens():
    model, ids = small("attention + kla"), text(3, 70)
    assert torch.equal(predicted_tokens(model, ids), model(ids).logits.argmax(-1))
    generator = torch.Generator().manual_seed(0)
    marginal = predicted_tokens(model, ids, num_samples=64, generator=generator)
    assert marginal.shape == ids.shape
    assert float((marginal == predicted_tokens(model, ids)).float().mean()) > 0.5


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"argmax\(-1\) to logits first"):
        TokenAccuracy().update(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))
