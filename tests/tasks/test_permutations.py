"""Running products: targets, special tokens, and that no problem comes twice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention.tasks import permutations
from kalman_attention.tasks.groups import GROUPS, group
from kalman_attention.tasks.permutations import A5, Permutations
from kalman_attention.tasks.task import leakage
from tests.tasks.solve import IGNORE, agree


def check_products(task, inputs, targets):
    """Multiply the permutations one after the other, in plain Python."""
    elements = group(task.group).elements
    number = {p: i for i, p in enumerate(elements)}
    for row, products in zip(inputs.tolist(), targets.tolist(), strict=True):
        current = tuple(range(len(elements[0])))
        for token, product in zip(row, products, strict=True):
            current = tuple(current[elements[token][i]] for i in range(len(current)))
            assert product == number[current]


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(GROUPS),
    length=st.integers(1, 12),
    bos=st.booleans(),
    split=st.sampled_from(["train", "test"]),
    seed=st.integers(0, 10**12),
)
def test_any_options(name, length, bos, split, seed):
    task = Permutations(group=name, seq_len=length, bos=bos, train_size=30, test_size=20)
    assert len(task.token_names()) == task.vocab_size
    count = min(20, task.size(split))
    inputs, targets = task.generate(split, seed=seed, count=count)
    assert inputs.shape == targets.shape == (count, task.input_len)
    if bos:
        assert set(inputs[:, 0].tolist()) | set(targets[:, 0].tolist()) == {task.token("BOS")}
    check_products(task, inputs[:, int(bos) :], targets[:, int(bos) :])


def test_published_tokens():
    task = A5()
    assert task.vocab_size == 67
    assert [task.token(name) for name in permutations.SPECIAL] == list(range(60, 67))
    assert permutations.SPECIAL[:2] == ("PAD", "BOS")
    assert (task.size("train"), task.size("test")) == (803_600, 200_000)


@pytest.mark.parametrize("score_padding", [True, False])
def test_pairs_are_added_to_training(score_padding):
    task = A5(seq_len=5, train_size=50, test_size=10, score_padding=score_padding)
    inputs, targets = task.generate("train")
    assert inputs.shape == (50 + 3600, 6)
    short, answers = inputs[50:], targets[50:]
    assert bool((short[:, 3:] == 60).all())
    assert bool((answers[:, 3:] == (60 if score_padding else IGNORE)).all())
    assert len({tuple(row) for row in short[:, 1:3].tolist()}) == 3600
    check_products(task, short[:, 1:3], answers[:, 1:3])
    assert not bool((task.generate("test").inputs == 60).any())
    without = A5(seq_len=5, train_size=50, test_size=10, pairs=False).generate("train")
    assert torch.equal(without.inputs, inputs[:50])
    # Where all problems are pairs, adding them would put the test set into training.
    assert A5(seq_len=2).size("train") == 3600 - 720


@pytest.mark.parametrize(
    ("length", "train", "test", "enumerable"),
    [
        (2, 2000, 700, 2**22),
        (2, 2000, 700, 0),  # most draws repeat an earlier one
        (3, 3000, 1000, 2**22),
        (4, 3000, 1000, 2**22),
        (10, 3000, 1000, 2**22),
        (20, 70_000, 1000, 2**22),  # by hash, and more than one block
    ],
)
def test_no_problem_comes_twice(monkeypatch, length, train, test, enumerable):
    monkeypatch.setattr(permutations, "_ENUMERABLE", enumerable)
    monkeypatch.setattr(permutations, "_DRAWN", 1 << 12)
    task = A5(seq_len=length, train_size=train, test_size=test, pairs=False)
    parts = [task.generate(split, seed=3).inputs for split in ("train", "test")]
    assert [len(part) for part in parts] == [train, test]
    assert len({tuple(row) for part in parts for row in part.tolist()}) == train + test
    assert leakage(*parts) == 0.0
    assert torch.equal(task.generate("train", seed=3, count=50).inputs, parts[0][:50])
    assert torch.equal(task.generate("test", seed=3, count=50).inputs, parts[1][:50])
    for column in (1, length):
        assert agree(parts[0][:3000, column].tolist(), list(range(60)) * 50)


def test_few_problems_are_split_four_to_one():
    task = A5(seq_len=2)
    train, test = (task.generate(split).inputs for split in ("train", "test"))
    assert (len(train), len(test)) == (2880, 720)
    assert len({tuple(row) for row in torch.cat([train, test]).tolist()}) == 3600


def test_fresh_batches():
    task = A5(seq_len=8, train_size=100, test_size=20)
    stream = task.stream(16, seed=5)
    first, second = next(stream), next(stream)
    assert first.inputs.shape == (16, 9)
    assert not torch.equal(first.inputs, second.inputs)
    assert torch.equal(next(task.stream(16, seed=5)).inputs, first.inputs)
    check_products(task, first.inputs[:, 1:], first.targets[:, 1:])


def test_bad_options():
    with pytest.raises(ValueError, match=r"unknown group .d4.\. Known: z2, a5"):
        Permutations(group="d4")
    with pytest.raises(ValueError, match=r"between 0 and 20.*Set test_size.*stream\(\)"):
        A5(test_size=20).generate("test", count=21)
