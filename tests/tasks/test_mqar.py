"""Zoology's recall; ours at that length is tested with the other recall tasks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention.tasks.mqar import ZoologyMQAR
from tests.tasks.solve import IGNORE, agree


def check_rows(task, rows):
    pairs, half = task.num_pairs, task.vocab_size // 2
    for row, targets in zip(rows.inputs.tolist(), rows.targets.tolist(), strict=True):
        keys, values = row[: 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(1 <= key < half for key in keys)
        assert all(half <= value < task.vocab_size for value in values)
        asked = {t: target for t, target in enumerate(targets) if target != IGNORE}
        assert sorted(row[t] for t in asked) == sorted(keys)  # each key once
        assert all(t >= 2 * pairs and t % 2 == 0 for t in asked)
        bound = dict(zip(keys, values, strict=True))
        assert all(bound[row[t]] == value for t, value in asked.items())
        if not task.random_filler:
            rest = set(range(2 * pairs, task.seq_len)) - set(asked)
            assert all(row[t] == 0 for t in rest)


@settings(max_examples=25, deadline=None)
@given(
    half=st.integers(2, 40),
    pairs=st.integers(1, 8),
    room=st.integers(0, 10),
    random_filler=st.booleans(),
    seed=st.integers(0, 10**12),
)
def test_any_options(half, pairs, room, random_filler, seed):
    task = ZoologyMQAR(
        vocab_size=2 * half,
        num_pairs=min(pairs, half - 1),
        seq_len=4 * pairs + 2 * room,
        random_filler=random_filler,
    )
    assert len(task.token_names()) == task.vocab_size
    check_rows(task, task.generate("train", seed=seed, count=30))


def test_published_settings():
    task = ZoologyMQAR()
    rows = task.generate("test", count=50)
    check_rows(task, rows)
    assert bool((rows.inputs[:, 128:] != 0).float().mean() > 0.99)


def test_slots_are_drawn_without_replacement_by_weight():
    task = ZoologyMQAR(vocab_size=16, num_pairs=3, seq_len=26, random_filler=False)
    rows = task.generate("test", count=4000)
    ours = [
        tuple(t // 2 - 3 for t, target in enumerate(targets) if target != IGNORE)
        for targets in rows.targets.tolist()
    ]
    weights = np.arange(1, 11) ** (0.01 - 1.0)
    rng = np.random.default_rng(3)
    theirs = [
        tuple(sorted(rng.choice(10, 3, replace=False, p=weights / weights.sum()).tolist()))
        for _ in range(4000)
    ]
    assert agree(ours, theirs)


def test_half_of_the_queries_come_soon():
    task = ZoologyMQAR(vocab_size=256, seq_len=2048, num_pairs=127)
    targets = task.generate("test", count=60).targets
    slots = (targets != IGNORE).nonzero()[:, 1].sub(254).div(2, rounding_mode="floor")
    assert abs(float((slots < 127).double().mean()) - 0.5) < 0.06


@pytest.mark.parametrize(("count", "high"), [(3, 40), (12, 13)], ids=["redrawn", "shuffled"])
def test_distinct_numbers_are_uniform(count, high):
    from kalman_attention.tasks.mqar import _distinct

    found = _distinct(20_000, count, high, torch.Generator().manual_seed(0))
    ordered = found.sort(1).values
    assert bool((ordered[:, 1:] > ordered[:, :-1]).all())
    for column in (0, count - 1):
        assert agree(found[:, column].tolist(), list(range(high)) * math.ceil(20_000 / high))
    firsts = [tuple(row[:2]) for row in found.tolist()]
    assert agree([a < b for a, b in firsts], [True, False] * 10_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 254}, "seq_len must be at least 256"),
        ({"vocab_size": 64}, "num_pairs must be at most"),
        ({"vocab_size": 8191}, "must be even"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ZoologyMQAR(**options)
