"""Recall, with and without noise, and at the length of MQAR."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention.tasks.mad.recall import NoisyRecall, Recall
from kalman_attention.tasks.mqar import MQAR
from tests.tasks.solve import IGNORE, agree, recall_row, recall_targets


def solved(task, rows):
    targets = [recall_targets(row, task.num_keys, task.num_values) for row in rows.inputs.tolist()]
    return torch.tensor(targets)


@pytest.mark.parametrize("task", [Recall(), NoisyRecall()], ids=["plain", "noisy"])
def test_test_targets_follow_from_inputs(task):
    rows = task.generate("test", count=200)
    assert torch.equal(rows.targets, solved(task, rows))
    assert bool((rows.targets[:, -1] != IGNORE).all())


@pytest.mark.parametrize("task", [Recall(), NoisyRecall()], ids=["plain", "noisy"])
def test_training_targets_are_the_next_tokens(task):
    rows = task.generate("train", count=100)
    assert torch.equal(rows.targets[:, :-1], rows.inputs[:, 1:])
    # The last target is the value of the last key.
    assert torch.equal(rows.targets[:, -1], solved(task, rows)[:, -1])


@settings(max_examples=25, deadline=None)
@given(
    keys=st.integers(1, 9),
    odd=st.integers(0, 1),
    pairs=st.integers(2, 20),
    noise_vocab=st.integers(0, 4),
    noise=st.sampled_from([0.0, 0.3, 0.95]),
    seed=st.integers(0, 10**12),
)
def test_any_options(keys, odd, pairs, noise_vocab, noise, seed):
    task = Recall(
        vocab_size=2 * keys + odd + noise_vocab,
        seq_len=2 * pairs,
        noise_vocab=noise_vocab,
        noise=noise if noise_vocab else 0.0,
    )
    assert len(task.token_names()) == task.vocab_size
    rows = task.generate("test", seed=seed, count=40)
    assert rows.inputs.shape == rows.targets.shape == (40, task.input_len)
    assert torch.equal(rows.targets, solved(task, rows))


def test_baseline_layout():
    task = Recall()
    rows = task.generate("test")
    assert rows.inputs.shape == (1280, 127)
    assert set(rows.inputs[:, ::2].unique().tolist()) == set(range(8))
    assert set(rows.inputs[:, 1::2].unique().tolist()) == set(range(8, 16))
    distinct = torch.tensor([len(set(row)) for row in rows.inputs[:, ::2].tolist()])
    assert torch.equal((rows.targets != IGNORE).sum(1), 64 - distinct)
    assert float((distinct == 8).float().mean()) > 0.99  # 56 scored positions, nearly always
    assert task.chance == 1 / 8


def test_values_are_drawn_independently():
    # Eight keys with a value each out of eight: all different in 8! / 8^8 = 0.24 % of sequences.
    rows = Recall().generate("test", count=3000)
    shared = [len(set(row[1::2])) < len(set(row[:-1:2])) for row in rows.inputs.tolist()]
    assert 0.990 < sum(shared) / len(shared) < 0.9999


def test_noise_takes_slots_of_two():
    rows = NoisyRecall().generate("test", count=4000)
    noise = rows.inputs >= 16
    slots = noise[:, :-1].view(-1, 63, 2)
    assert torch.equal(slots[..., 0], slots[..., 1])
    assert not bool(noise[:, -1].any())
    # One of 64 slots is protected: 0.2 (1 - 1 / 64) in the mean.
    expected, share = 0.2 * 63 / 64, float(slots[..., 0].double().mean())
    assert abs(share - expected) < 4 * math.sqrt(0.16 / (4000 * 63))
    scored = (rows.targets != IGNORE).sum(1).double()
    assert abs(float(scored.mean()) - 43.6) < 0.25


@pytest.mark.parametrize(
    "task",
    [
        Recall(vocab_size=8, seq_len=12),
        NoisyRecall(vocab_size=9, noise_vocab=3, noise=0.3, seq_len=24),
    ],
    ids=["plain", "noisy"],
)
def test_distribution_is_that_of_the_procedure(task):
    rng = np.random.default_rng(0)
    slow = [recall_row(task, rng) for _ in range(4000)]
    rows = task.generate("train", count=4000)
    fast = torch.cat([rows.inputs, rows.targets[:, -1:]], 1).tolist()
    for place in (0, 1, 4, 5, task.seq_len - 2, task.seq_len - 1):
        assert agree([row[place] for row in fast], [row[place] for row in slow]), place
    for view in (
        lambda row: len(set(row[::2])),
        lambda row: len(set(row[1::2])),
        lambda row: row[:-2:2].count(row[-2]),  # how often the last key came before
        lambda row: sum(token >= task.num_keys + task.num_values for token in row),
        lambda row: (row[-2], row[0]),
    ):
        assert agree([view(row) for row in fast], [view(row) for row in slow])


@pytest.mark.parametrize(
    ("task", "count", "floor"),
    [(Recall(), 500, 1.1625), (MQAR(), 20, 2.728)],
    ids=["recall", "mqar"],
)
def test_training_loss_floor(task, count, floor):
    # What remains for a predictor that knows the task: random keys, and values seen first.
    rows = task.generate("train", count=count)
    nats = 0.0
    for tokens, targets in zip(rows.inputs.tolist(), rows.targets.tolist(), strict=True):
        bound = {}
        for t, (token, target) in enumerate(zip(tokens, targets, strict=True)):
            if t % 2:
                nats += math.log(task.num_keys)
            elif token in bound:
                assert target == bound[token]
            else:
                nats += math.log(task.num_values)
                bound[token] = target
    assert nats / rows.targets.numel() == pytest.approx(floor, abs=1e-3)


def test_mqar_is_recall_at_length():
    task = MQAR()
    rows = task.generate("test", count=20)
    assert rows.inputs.shape == (20, 2047)
    assert (task.num_keys, task.num_values, task.chance) == (128, 128, 1 / 128)
    assert Counter((rows.targets != IGNORE).sum(1).tolist()) == {896: 20}
    assert torch.equal(rows.targets, solved(task, rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 7}, "seq_len must be even"),
        ({"seq_len": 2}, "at least 4"),
        ({"noise": 0.1}, "have tokens to draw from"),
        ({"noise": 1.0, "noise_vocab": 2}, r"in \[0, 1\)"),
        ({"vocab_size": 5, "noise_vocab": 4}, "must hold a key, a value"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Recall(**options)
