"""Schedules against their formulas."""

import math

import pytest

from kalman_attention.train.config import TrainConfig
from kalman_attention.train.schedule import constant, cosine, trapezoidal


@pytest.mark.parametrize("total", [1, 2, 3, 10, 13_733, 20_790])
def test_trapezoidal_is_the_papers(total):
    W = round(0.4 * total)
    for step in range(0, total, max(1, total // 97)):
        expected = 1.0 if step <= total - W else (total - step) / W
        assert trapezoidal(step, total) == expected
    assert trapezoidal(total - 1, total) == (1 / W if W > 1 else 1.0)
    assert trapezoidal(total - W, total) == 1.0


def test_trapezoidal_heads_for_its_end():
    assert trapezoidal(10, 10, final=0.05) == pytest.approx(0.05)
    assert trapezoidal(8, 10, final=0.05) == pytest.approx(0.5 + 0.5 * 0.05)
    assert trapezoidal(9, 10, decay_fraction=0.0) == 1.0


def test_cosine():
    assert cosine(0, 100) == 1.0
    assert cosine(50, 100) == pytest.approx(0.5)
    assert cosine(25, 100) == pytest.approx(0.5 + math.sqrt(0.5) / 2)
    assert cosine(100, 100, final=0.1) == pytest.approx(0.1)
    assert cosine(20, 100, warmup=20) == 1.0
    assert cosine(60, 100, warmup=20) == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", [constant, cosine, trapezoidal])
def test_warmup(schedule):
    assert [schedule(step, 50, warmup=4) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "function", "options"),
    [
        ("constant", constant, {}),
        ("cosine", cosine, {"final": 0.1}),
        ("trapezoidal", trapezoidal, {"final": 0.1, "decay_fraction": 0.3}),
    ],
)
def test_the_config_chooses(name, function, options):
    config = TrainConfig(
        max_steps=50, schedule=name, warmup_steps=5, final_fraction=0.1, decay_fraction=0.3
    )
    for step in range(50):
        assert config.factor(step, 50) == function(step, 50, warmup=5, **options)
