"""Fuzzy recall: the vectorised procedure against the one that is described."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention.tasks.mad.fuzzy_recall import FuzzyRecall
from tests.tasks.solve import IGNORE, agree, fuzzy_pairs, fuzzy_row, fuzzy_targets

SMALL = FuzzyRecall(vocab_size=9, seq_len=28, key_motif=2, value_motif=2)


def check_rows(task, rows):
    """Compare with the solver; the share of rows that have no answer."""
    unanswerable = 0
    for row, targets in zip(rows.inputs.tolist(), rows.targets.tolist(), strict=True):
        found = fuzzy_targets(row, task.num_keys, task.vocab_size - 1)
        if found is None:
            unanswerable += 1
            assert targets[-1] != IGNORE
        else:
            assert targets == found
    return unanswerable / len(rows.inputs)


def test_test_targets_follow_from_inputs():
    task = FuzzyRecall()
    rows = task.generate("test", count=6000)
    # The probe's place lies past the end of the context in 2.3 % of rows (60,000 slow ones).
    assert 0.017 < check_rows(task, rows) < 0.029
    scored = (rows.targets != IGNORE).sum(1)
    assert 4.30 < float(scored.double().mean()) < 4.50
    assert int(scored.min()) == 1
    assert bool((rows.targets[:, -1] != IGNORE).all())


@settings(max_examples=20, deadline=None)
@given(
    key_motif=st.integers(1, 3),
    value_motif=st.integers(1, 3),
    more=st.integers(0, 3),
    room=st.integers(0, 30),
    seed=st.integers(0, 10**12),
)
def test_any_options(key_motif, value_motif, more, room, seed):
    task = FuzzyRecall(
        vocab_size=2 * max(key_motif, value_motif) + 1 + more,
        seq_len=2 * (key_motif + value_motif) + 1 + room,
        key_motif=key_motif,
        value_motif=value_motif,
    )
    assert len(task.token_names()) == task.vocab_size
    rows = task.generate("test", seed=seed, count=40)
    assert rows.inputs.shape == rows.targets.shape == (40, task.seq_len)
    check_rows(task, rows)


@pytest.mark.parametrize("split", ["train", "test"])
def test_layout(split):
    rows = FuzzyRecall().generate(split, count=3000)
    sizes = {"key": set(), "value": set()}
    for row in rows.inputs.tolist():
        pads, pairs = fuzzy_pairs(row, 7, 15)
        assert 2 <= pads <= 7
        for _, key, value in pairs[:-1]:
            assert len(set(key)) == len(key)
            assert len(set(value)) == len(value)
            sizes["key"].add(len(key))
            sizes["value"].add(len(value))
    assert sizes == {"key": {1, 2, 3} if split == "train" else {3}, "value": {1, 2, 3}}


def test_training_targets_are_the_next_tokens():
    rows = FuzzyRecall().generate("train", count=100)
    assert torch.equal(rows.targets[:, :-1], rows.inputs[:, 1:])
    assert not bool((rows.targets == IGNORE).any())
    assert bool((rows.targets == 15).any())  # padding is predicted too


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    ("task", "count"), [(SMALL, 4000), (FuzzyRecall(), 2000)], ids=["small", "baseline"]
)
def test_distribution_is_that_of_the_procedure(task, count, split):
    rng = np.random.default_rng(1)
    slow = [fuzzy_row(task, split, rng) for _ in range(count)]
    rows = task.generate(split, count=count)
    last = rows.targets[:, -1:]
    pad = task.vocab_size - 1
    fast = [
        [token for token in row if token != pad]
        for row in torch.cat([rows.inputs, last], 1).tolist()
    ]

    parsed = {id(row): fuzzy_pairs(row, task.num_keys, pad)[1] for row in (*fast, *slow)}

    def pairs(row):
        return parsed[id(row)]

    def keys(row):
        return [key for _, key, _ in pairs(row)]

    def place(row):
        *context, (_, probe, _) = pairs(row)
        found = [start for start, key, _ in context if key == probe]
        return found[0] // 8 if found else -1

    views = {
        "length": len,
        "pairs": lambda row: len(pairs(row)),
        "first token": lambda row: row[0],
        "last token": lambda row: row[-1],
        "size of the second key": lambda row: len(pairs(row)[1][1]),
        "size of the probe": lambda row: (len(pairs(row)[-1][1]), len(pairs(row)[-1][2])),
        "place of the probe": place,
        "scored": lambda row: sum(
            len(value) for i, (_, key, value) in enumerate(pairs(row)) if key in keys(row)[:i]
        ),
        "different keys": lambda row: len(set(keys(row))),
        "how often the probe": lambda row: keys(row).count(keys(row)[-1]),
        "different values": lambda row: len({value for _, _, value in pairs(row)}),
    }
    for name, view in views.items():
        assert agree([view(row) for row in fast], [view(row) for row in slow]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 6}, "motif consists of distinct tokens"),
        ({"seq_len": 12}, "seq_len must be at least 13"),
        ({"key_motif": 0}, "key_motif must be at least 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        FuzzyRecall(**options)
