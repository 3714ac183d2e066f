"""Both loaders against the plainest code that says the same, and their cursors."""

import json
from itertools import chain, pairwise

import numpy as np
import pytest

pytest.importorskip("tokenizers")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kalman_attention.data import loader as loading
from kalman_attention.data.loader import PackingLoader, WindowLoader
from kalman_attention.data.shards import ShardedTokens
from tests.data.small import shards
from tests.models.small import small

LOADERS = [WindowLoader, PackingLoader]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return ShardedTokens(shards(tmp_path_factory.mktemp("data"), documents=80))


def documents(data, split="train"):
    found = []
    for shard in data.shards(split):
        tokens, offsets = np.array(data.tokens(shard)), data.offsets(shard)
        found += [tokens[a:b].tolist() for a, b in pairwise(offsets)]
    return found


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_windows_are_the_documents_in_a_row(data):
    stream = list(chain(*documents(data)))
    loader = WindowLoader(data, 3, 11)
    place = 0
    while place < 2.5 * len(stream):
        batch = next(loader)
        want = [stream[(place + i) % len(stream)] for i in range(34)]
        assert batch.inputs.flatten().tolist() == want[:-1]
        assert batch.targets.flatten().tolist() == want[1:]
        assert torch.equal(batch.starts, batch.inputs == data.index.bos)
        place += 33
        assert loader.epoch == place // len(stream)


@pytest.mark.parametrize("lanes", [2, 5, 7])
def test_lanes_read_at_several_places(data, lanes):
    stream = list(chain(*documents(data)))
    size, apart = len(stream), len(stream) // lanes
    rows = []
    one, many = (WindowLoader(data, B, 11, lanes=lanes) for B in (1, 3))
    for _ in range(size // 33):
        batch = next(many)
        assert same(
            batch, [torch.cat(parts) for parts in zip(*(next(one) for _ in range(3)), strict=True)]
        )
        rows += torch.cat([batch.inputs, batch.targets[:, -1:]], 1).tolist()
    for i, row in enumerate(rows):
        begin = (i % lanes) * apart + (i // lanes) * 11
        assert row == [stream[(begin + k) % size] for k in range(12)]
    again = WindowLoader(data, 3, 11, lanes=lanes)
    again.load_state_dict(json.loads(json.dumps(many.state_dict())))
    assert same(next(again), next(many))
    with pytest.raises(ValueError, match="lanes"):
        WindowLoader(data, 3, 11, lanes=lanes + 1).load_state_dict(many.state_dict())
    with pytest.raises(ValueError, match="lanes must be at least 1"):
        WindowLoader(data, 3, 11, lanes=0)


def plain_packing(texts, size, capacity):
    """Rows by best fit, as it is described: a list, searched from the front."""
    waiting, taken = [], 0
    while True:
        row = []
        while len(row) < size:
            while len(waiting) < capacity:
                waiting.append(texts[taken % len(texts)])
                taken += 1
            room = size - len(row)
            fits = [each for each in waiting if len(each) <= room]
            if fits:
                longest = max(len(each) for each in fits)
                chosen = next(i for i, each in enumerate(waiting) if len(each) == longest)
            else:
                shortest = min(len(each) for each in waiting)
                chosen = next(i for i, each in enumerate(waiting) if len(each) == shortest)
            row += waiting.pop(chosen)[:room]
        yield row


@pytest.mark.parametrize("size", [4, 25, 200])
def test_packing_is_best_fit(data, size, monkeypatch):
    monkeypatch.setattr(loading, "BUFFER_DOCUMENTS", 20)
    loader = PackingLoader(data, 4, size)
    rows = plain_packing(documents(data), size + 1, 20)
    for _ in range(20):
        batch = next(loader)
        for inputs, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            want = next(rows)
            assert want[0] == data.index.bos
            assert inputs == want[:-1]
            assert targets == want[1:]
    assert loader.used == 80 * (size + 1)
    waiting = sum(loader._lengths[n % len(loader._lengths)] for n in loader._cursor()["waiting"])
    taken = sum(loader._lengths[n % len(loader._lengths)] for n in range(loader._next))
    assert loader.used + loader.discarded + waiting == taken


@pytest.mark.parametrize("kind", LOADERS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.integers(0, 60), length=st.integers(1, 70), world=st.integers(1, 3))
def test_resumed_anywhere_the_batches_are_the_same(data, kind, before, length, world):
    make = {"rank": world - 1, "world_size": world}
    loader = kind(data, 2, length, **make)
    for _ in range(before):
        next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    again = kind(data, 2, length, **make)
    again.load_state_dict(state)
    for _ in range(5):
        assert same(next(loader), next(again))
    assert loader.state_dict() == again.state_dict()


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_share_the_documents(data, world, monkeypatch):
    monkeypatch.setattr(loading, "GROUP_DOCUMENTS", 5)
    every = documents(data)
    starts = []
    for rank in range(world):
        mine = WindowLoader(data, 1, 1, rank=rank, world_size=world)._documents
        stream = np.concatenate(mine.stretches).tolist()
        borders = [i for i, token in enumerate(stream) if token == data.index.bos]
        found = [stream[a:b] for a, b in zip(borders, [*borders[1:], None], strict=True)]
        assert [len(each) for each in found] == mine.length.tolist()
        starts += found
    assert sorted(starts) == sorted(every)


def test_a_rank_reads_every_so_many_groups(data, monkeypatch):
    monkeypatch.setattr(loading, "GROUP_DOCUMENTS", 1)
    every = documents(data)
    mine = WindowLoader(data, 1, 1, rank=1, world_size=3)._documents
    assert np.concatenate(mine.stretches).tolist() == list(chain(*every[1::3]))


def test_groups_shrink_until_every_rank_has_one(data):
    many = len(documents(data))
    for rank in range(many):
        assert len(WindowLoader(data, 1, 1, rank=rank, world_size=many)._documents) >= 1
    with pytest.raises(ValueError, match="too few for"):
        WindowLoader(data, 1, 1, world_size=many + 1)


def test_packed_borders(data):
    batch = next(WindowLoader(data, 3, 40))
    inputs, targets, borders = batch.packed()
    assert inputs.shape == targets.shape == (1, 120)
    assert borders.dtype == torch.int32
    wanted = {0, 40, 80, 120} | set((inputs[0] == data.index.bos).nonzero().squeeze(1).tolist())
    assert borders.tolist() == sorted(wanted)


def test_packed_documents_do_not_see_each_other(data):
    model = small(plan="kla + attention")
    model.embedding = torch.nn.Embedding(data.index.vocab_size, 16)
    inputs, _, borders = next(PackingLoader(data, 2, 60)).packed()
    together = model(inputs, cu_seqlens=borders).hidden
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        alone = model(inputs[:, begin:end]).hidden
        torch.testing.assert_close(together[:, begin:end], alone, atol=1e-5, rtol=1e-5)


def test_the_state_of_another_loader_is_refused(data):
    state = WindowLoader(data, 2, 8).state_dict()
    with pytest.raises(ValueError, match="kind: windows then, packing now"):
        PackingLoader(data, 2, 8).load_state_dict(state)
    with pytest.raises(ValueError, match="world_size: 1 then, 2 now"):
        WindowLoader(data, 2, 8, world_size=2).load_state_dict(state)
    with pytest.raises(ValueError, match="split: train then, validation now"):
        WindowLoader(data, 2, 8, split="validation").load_state_dict(state)


def test_refused_arguments(data):
    with pytest.raises(ValueError, match="batch_size and seq_len must be at least 1"):
        WindowLoader(data, 0, 8)
    with pytest.raises(ValueError, match="rank must be from 0"):
        WindowLoader(data, 1, 8, rank=2, world_size=2)
    with pytest.raises(ValueError, match="no documents for test"):
        WindowLoader(data, 1, 8, split="test")


@pytest.mark.parametrize("kind", LOADERS)
def test_validation_is_not_training(data, kind):
    texts = documents(data, "validation")
    batch = next(kind(data, 1, len(texts[0]) - 1, split="validation"))
    assert batch.inputs[0, 0] == data.index.bos
    row = [*batch.inputs[0].tolist(), batch.targets[0, -1].item()]
    assert row in texts
    assert row not in documents(data)
