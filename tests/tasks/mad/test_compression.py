"""Compression."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention.tasks.mad.copying import Compression
from tests.tasks.solve import agree


@settings(max_examples=25, deadline=None)
@given(vocab=st.integers(2, 40), length=st.integers(2, 40), seed=st.integers(0, 10**12))
def test_any_options(vocab, length, seed):
    task = Compression(vocab_size=vocab, seq_len=length)
    assert len(task.token_names()) == vocab
    for split in ("train", "test"):
        rows = task.generate(split, seed=seed, count=20)
        assert rows.inputs.shape == (20, length)
        assert torch.equal(rows.inputs, rows.targets)
        assert rows.inputs.data_ptr() != rows.targets.data_ptr()
        assert bool((rows.inputs[:, -1] == vocab - 1).all())
        assert int(rows.inputs[:, :-1].max()) < vocab - 1


def test_content_is_uniform():
    rows = Compression().generate("train", count=1000).inputs[:, :-1]
    assert agree(rows.flatten().tolist(), list(range(15)) * 2000)
    assert agree((rows[:, 0] * 15 + rows[:, 1]).tolist(), list(range(225)) * 5)
