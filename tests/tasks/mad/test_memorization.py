"""Memorization."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention.tasks.mad.recall import Memorization
from tests.tasks.solve import IGNORE, agree


def learned(rows, insert):
    """The map that the rows show; an error if they show two."""
    found = {}
    for row, targets in zip(rows.inputs.tolist(), rows.targets.tolist(), strict=True):
        assert set(row[1::2]) == {insert}
        assert set(targets[::2]) == {IGNORE}
        for key, value in zip(row[::2], targets[1::2], strict=True):
            assert found.setdefault(key, value) == value
    return found


def test_one_map_for_train_and_test():
    task = Memorization()
    train, test = (learned(task.generate(split), 255) for split in ("train", "test"))
    assert train == test
    assert len(train) == task.num_keys == 127
    assert sorted(train) == list(range(127))
    assert len(set(train.values())) == 127
    assert set(train.values()) < set(range(127, 255))
    assert train == dict(enumerate(task.mapping(0).tolist()))
    assert task.size("train") == 256
    assert task.size("test") == 1280


def test_the_map_changes_with_the_seed_only():
    task = Memorization()
    assert not torch.equal(task.mapping(0), task.mapping(1))
    assert torch.equal(task.mapping(1), Memorization(seq_len=8, test_size=9).mapping(1))
    unused = [(set(range(3, 7)) - set(SMALL.mapping(seed).tolist())).pop() for seed in range(2000)]
    assert agree(unused, [3, 4, 5, 6] * 1000)


SMALL = Memorization(vocab_size=8, seq_len=8)


@settings(max_examples=25, deadline=None)
@given(vocab=st.integers(3, 40), half=st.integers(1, 10), seed=st.integers(0, 10**12))
def test_any_options(vocab, half, seed):
    task = Memorization(vocab_size=vocab, seq_len=2 * half)
    assert len(task.token_names()) == vocab
    found = learned(task.generate("test", seed=seed, count=30), vocab - 1)
    assert len(set(found.values())) == len(found)
    assert all(k < task.num_keys <= v < vocab - 1 for k, v in found.items())


def test_bad_options():
    with pytest.raises(ValueError, match="seq_len must be even"):
        Memorization(seq_len=31)
