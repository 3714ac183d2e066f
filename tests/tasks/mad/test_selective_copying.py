"""Selective copying."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kalman_attention.tasks.mad.copying import SelectiveCopying
from tests.tasks.solve import IGNORE, agree, copying_row


def check_rows(task, rows):
    blank, marker, start = task.vocab_size - 2, task.vocab_size - 1, task.seq_len - task.num_copied
    for row, targets in zip(rows.inputs.tolist(), rows.targets.tolist(), strict=True):
        content = [token for token in row[: start - 1] if token != blank]
        assert len(content) == task.num_copied
        assert all(token < blank for token in content)
        assert row[start - 2] == content[-1]  # nothing between the last token and the marker
        assert row[start - 1 :] == [marker] + [blank] * task.num_copied
        assert targets == [IGNORE] * start + content


def test_baseline():
    task = SelectiveCopying()
    assert (task.num_blanks, task.chance) == (223, 1 / 14)
    for split in ("train", "test"):
        check_rows(task, task.generate(split, count=200))


@settings(max_examples=25, deadline=None)
@given(
    content=st.integers(1, 9),
    num_copied=st.integers(1, 6),
    blanks=st.integers(0, 12),
    seed=st.integers(0, 10**12),
)
def test_any_options(content, num_copied, blanks, seed):
    task = SelectiveCopying(
        vocab_size=content + 2, num_copied=num_copied, seq_len=2 * num_copied + 1 + blanks
    )
    assert len(task.token_names()) == task.vocab_size
    check_rows(task, task.generate("test", seed=seed, count=40))


def test_distribution_is_that_of_the_procedure():
    task = SelectiveCopying(vocab_size=6, seq_len=20, num_copied=3)
    rng = np.random.default_rng(2)
    slow = [copying_row(task, rng) for _ in range(4000)]
    fast = task.generate("train", count=4000).inputs.tolist()

    def gaps(row):
        places = [i for i, token in enumerate(row[:16]) if token < 4]
        return tuple(places)

    for view in (gaps, lambda row: row[15], lambda row: row[0]):
        assert agree([view(row) for row in fast], [view(row) for row in slow])


def test_bad_options():
    with pytest.raises(ValueError, match=r"at least 2 num_copied \+ 1 = 33"):
        SelectiveCopying(seq_len=32)
