"""The configuration of a run."""

import dataclasses
import json
import math

import pytest

from kalman_attention.train.config import FREE, TrainConfig


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(max_steps=10),
        TrainConfig(epochs=3, eval_every="epoch", betas=(0.8, 0.95), clip=3.0, patience=2,
                    monitor="accuracy", target=0.999, dtype="bfloat16"),
    ],
)  # fmt: skip
def test_json_round_trip(config):
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_fields():
    with pytest.raises(ValueError, match="unknown fields: rate"):
        TrainConfig.from_dict({"max_steps": 1, "rate": 2})


@pytest.mark.parametrize("length", [{}, {"max_steps": 3, "epochs": 3}])
def test_one_length(length):
    with pytest.raises(ValueError, match="either max_steps or epochs"):
        TrainConfig(**length)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "max_steps must be a whole number, 1 or more, got 0"),
        ({"max_steps": 2.5}, "max_steps must be"),
        ({"accumulate": True}, "accumulate must be"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": math.nan}, "lr must be positive"),
        ({"clip": math.inf}, "clip must be positive and finite"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"schedule": "step"}, "one of constant, cosine, trapezoidal, got 'step'"),
        ({"mode": "least"}, "mode must be one of max, min"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"eval_every": "hour"}, "eval_every must be"),
        ({"warmup_steps": -1}, "warmup_steps must be 0 or more"),
        ({"decay_fraction": 1.5}, "decay_fraction must be between 0 and 1"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or more"),
        ({"patience": 3}, "need a metric to monitor"),
        ({"target": 0.9}, "need a metric to monitor"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"max_steps": 5, **options})


def test_what_is_better():
    most = TrainConfig(max_steps=1, monitor="m", min_delta=0.1, target=0.9)
    assert most.is_better(0.2, None)
    assert not most.is_better(math.nan, None)
    assert most.is_better(0.35, 0.2)
    assert not most.is_better(0.25, 0.2)
    assert most.reaches_target(0.9)
    assert not most.reaches_target(math.nan)
    least = dataclasses.replace(most, mode="min")
    assert least.is_better(0.05, 0.2)
    assert not least.is_better(0.35, 0.2)
    assert least.reaches_target(0.8)


def test_the_length_is_free_unless_the_schedule_needs_it():
    constant = TrainConfig(max_steps=5)
    assert "max_steps" not in constant.fixed()
    assert "max_steps" in dataclasses.replace(constant, schedule="cosine").fixed()
    assert set(FREE) <= set(constant.to_dict())
    assert not FREE & set(constant.fixed())
