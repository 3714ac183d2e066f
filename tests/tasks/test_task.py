"""What all tasks promise: the same rows for the same seed, and nothing shared by train and test."""

import itertools

import pytest
import torch

from kalman_attention.tasks.registry import MAD, TASKS, make_task
from kalman_attention.tasks.task import IGNORE, Task, leakage, row_codes


def small(name):
    """The task with fewer rows, and shorter ones where the published ones are long."""
    options = {"train_size": 300, "test_size": 100}
    if name.startswith("mqar"):
        options |= {"vocab_size": 64, "seq_len": 64}
    if name == "mqar_zoology":
        options |= {"num_pairs": 8}
    return make_task(name, **options)


@pytest.mark.parametrize("name", TASKS)
def test_a_set_depends_on_task_and_seed_alone(name):
    task = small(name)
    before = torch.get_rng_state()
    first = task.generate("train", seed=1)
    torch.rand(3)
    again = task.generate("train", seed=1)
    torch.set_rng_state(before)
    task.generate("test", seed=1)
    assert torch.equal(torch.get_rng_state(), before)  # the global generator is not touched
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)
    part = task.generate("train", seed=1, count=7)
    assert torch.equal(part.inputs, first.inputs[:7])
    assert torch.equal(part.targets, first.targets[:7])
    assert not torch.equal(task.generate("train", seed=2, count=7).inputs, part.inputs)
    assert task.generate("train", count=0).inputs.shape == (0, task.input_len)


@pytest.mark.parametrize("name", TASKS)
def test_tokens_and_shapes(name):
    task = small(name)
    for split in ("train", "test"):
        inputs, targets = task.generate(split)
        assert inputs.shape == targets.shape == (task.size(split), task.input_len)
        assert inputs.dtype == targets.dtype == torch.int64
        assert int(inputs.min()) >= 0
        assert int(inputs.max()) < task.vocab_size
        assert bool(((targets >= 0) & (targets < task.vocab_size) | (targets == IGNORE)).all())
    assert 0.0 < task.chance < 1.0
    assert len(set(task.token_names())) == len(task.token_names()) == task.vocab_size


@pytest.mark.parametrize("name", TASKS)
def test_train_and_test_share_no_input(name):
    task = small(name)
    train = task.generate("train", seed=4).inputs
    test = task.generate("test", seed=4).inputs
    assert leakage(train, test) == 0.0
    assert leakage(train, torch.cat([test, train[:100]])) == 0.5


@pytest.mark.parametrize("name", MAD)
def test_published_sizes(name):
    task = make_task(name)
    assert task.size("train") == (256 if name == "memorization" else 12_800)
    assert task.size("test") == 1_280


def test_streams_never_start_from_the_same_point():
    task = make_task("recall")
    starts = {
        stream: {
            task._generator(stream, seed, block).initial_seed()
            for seed, block in itertools.product(range(50), range(20))
        }
        for stream in ("train", "test", "shared", "fresh")
    }
    assert all(len(found) == 1000 for found in starts.values())
    for i, found in enumerate(starts.values()):
        assert {seed >> 30 for seed in found} == {i}


def test_blocks_differ_and_sets_may_be_extended():
    task = make_task("compression", seq_len=12)
    rows = task.generate("test", count=3000).inputs
    assert torch.equal(rows[:1280], task.generate("test").inputs)
    assert not torch.equal(rows[:1024], rows[1024:2048])


def test_fresh_batches_are_new():
    task = make_task("selective_copying")
    stream = task.stream(8, seed=3)
    first, second = next(stream), next(stream)
    assert first.inputs.shape == (8, 256)
    assert leakage(first.inputs, second.inputs) == 0.0
    assert leakage(task.generate("train", seed=3, count=1000).inputs, first.inputs) == 0.0
    assert bool((next(make_task("recall").stream(4, split="test")).targets == IGNORE).any())


def test_leakage_is_exact():
    # Different rows with one code: the code alone does not decide.
    base = 6_364_136_223_846_793_005
    a, b = torch.tensor([[1, 0]]), torch.tensor([[0, base]])
    assert torch.equal(row_codes(a), row_codes(b))
    assert leakage(a, b) == 0.0
    assert leakage(torch.cat([b, a]), torch.cat([a, a, a + 1, a + 2])) == 0.5
    assert leakage(a, a[:0]) == 0.0
    assert leakage(a, torch.tensor([[1, 0, 0]])) == 0.0


def test_errors():
    with pytest.raises(ValueError, match="Known: recall, noisy_recall"):
        make_task("copying")
    for name in ("recall", "a5"):
        with pytest.raises(ValueError, match="'train' or 'test'"):
            make_task(name).generate("valid")
    with pytest.raises(ValueError, match="count must be at least 0"):
        make_task("recall").generate("test", count=-1)


def test_every_class_says_what_it_is():
    for cls in TASKS.values():
        assert issubclass(cls, Task)
        assert cls.scored
        assert cls(**cls.SHORT).input_len < 30
