"""Batches: every example once per epoch, and an exact cursor."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kalman_attention.train.data import GrowingBatches, StreamBatches, TensorBatches
from kalman_attention.train.seeds import derive_seed


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 45),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
def test_an_epoch_holds_every_example_once(size, batch_size, seed, shuffle):
    rows = torch.arange(size)
    batches = TensorBatches([rows, rows * 10], batch_size, seed, shuffle=shuffle)
    for _ in range(3):
        epoch = [next(batches) for _ in range(len(batches))]
        assert all(torch.equal(a * 10, b) for a, b in epoch)
        assert [len(a) for a, _ in epoch[:-1]] == [batch_size] * (len(batches) - 1)
        found = torch.cat([a for a, _ in epoch])
        assert found.sort().values.tolist() == rows.tolist()
        assert shuffle or found.tolist() == rows.tolist()


@given(st.integers(0, 30), st.integers(0, 5))
def test_the_cursor_is_exact(position, seed):
    whole = TensorBatches([torch.arange(11)], 3, seed)
    expected = [next(whole)[0].tolist() for _ in range(position + 4)][position:]
    state = {**whole.state_dict(), "position": position}
    resumed = TensorBatches([torch.arange(11)], 3, seed)
    resumed.load_state_dict(state)
    assert [next(resumed)[0].tolist() for _ in range(4)] == expected


def test_epochs_and_seeds_differ():
    def epoch(seed, number):
        batches = TensorBatches([torch.arange(50)], 50, seed)
        return batches.batch(number)[0].tolist()

    orders = [epoch(seed, number) for seed in range(3) for number in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert epoch(1, 2) == epoch(1, 2)


def test_sizes_of_the_mad_protocol():
    batches = TensorBatches([torch.zeros(12_800)], 172)
    assert len(batches) == 75
    assert len(batches.batch(74)[0]) == 72


def test_a_stream_is_a_function_of_its_position():
    def make(generator):
        return torch.randint(1000, (5,), generator=generator)

    stream = StreamBatches(make, seed=3)
    drawn = [next(stream).tolist() for _ in range(6)]
    assert len({tuple(x) for x in drawn}) == 6
    other = StreamBatches(make, seed=3)
    other.load_state_dict({"position": 4, "seed": 3})
    assert next(other).tolist() == drawn[4]
    assert stream.batch(0).tolist() == drawn[0]


def growing(**options):
    def make(length, generator):
        return torch.randint(1000, (2, length), generator=generator)

    return GrowingBatches(make, **{"seed": 3, "start": 2, "end": 4, "below": 0.5, **options})


def test_batches_grow_as_the_loss_falls_and_go_on_where_they_were():
    losses = iter([1.0, 0.4, 0.6, 0.1, 0.1, 0.1])

    def loss(model, batch, generator):
        return torch.tensor(next(losses)), {}

    batches = growing()
    watched = batches.watching(loss)
    lengths, states, drawn = [], [], []
    for _ in range(6):
        states.append(batches.state_dict())
        drawn.append(next(batches))
        lengths.append(drawn[-1].shape[1])
        watched(None, None, None)
    assert lengths == [2, 2, 3, 3, 4, 4]
    for state, batch in zip(states, drawn, strict=True):
        other = growing()
        other.load_state_dict(json.loads(json.dumps(state)))
        assert torch.equal(next(other), batch)
    kept = growing(end=9)
    with pytest.raises(ValueError, match="belongs to other batches"):
        kept.load_state_dict(states[-1])
    assert kept.length == 2
    with pytest.raises(ValueError, match="start <= end"):
        growing(start=5)


def test_bad_batches():
    with pytest.raises(ValueError, match=r"got lengths \[3, 4\]"):
        TensorBatches([torch.zeros(3), torch.zeros(4)], 2)
    with pytest.raises(ValueError, match="at least one example"):
        TensorBatches([], 2)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        TensorBatches([torch.zeros(3)], 0)
    other = TensorBatches([torch.zeros(3)], 2).state_dict()
    with pytest.raises(ValueError, match="belongs to other batches"):
        TensorBatches([torch.zeros(3)], 1).load_state_dict(other)
    with pytest.raises(ValueError, match="belongs to other batches"):
        TensorBatches([torch.ones(3)], 2).load_state_dict(other)


@given(st.integers(), st.integers(), st.integers())
def test_seeds_are_in_range_and_differ_by_purpose(seed, a, b):
    found = derive_seed(seed, "step", a)
    assert 0 <= found < 2**63
    assert found != derive_seed(seed, "loss", a)
    assert (a == b) == (found == derive_seed(seed, "step", b))
