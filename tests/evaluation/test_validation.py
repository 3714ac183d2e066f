"""Bits per byte of a validation split, against a loop over its tokens."""

import math

import pytest
import torch

pytest.importorskip("tokenizers")

from kalman_attention.data.shards import VALIDATION, ShardedTokens
from kalman_attention.evaluation.validation import validation_bits
from tests.data.small import shards
from tests.evaluation.checkpoints import model

ROW = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return ShardedTokens(shards(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module")
def stream(data):
    return [t for s in data.shards(VALIDATION) for t in data.tokens(s).tolist()]


def by_hand(scored, data, stream, rows, reset_state=False):
    """Protocol: nats over targets that are no special tokens, over ln 2 times their bytes."""
    sizes, bos = data.tokenizer().token_bytes(), data.index.bos
    nats = size = count = 0
    apart = len(stream) // rows
    for row in range(rows):
        ids = stream[apart * row : apart * row + ROW + 1]
        for place in range(ROW):
            seen = ids[: place + 1]
            if reset_state and bos in seen:
                seen = seen[len(seen) - 1 - seen[::-1].index(bos) :]
            if sizes[ids[place + 1]]:
                logits = scored(torch.tensor([seen])).logits[0, -1]
                nats -= logits.log_softmax(-1)[ids[place + 1]].item()
                size += int(sizes[ids[place + 1]])
                count += 1
    return {"bits_per_byte": nats / math.log(2) / size, "loss": nats / count}


@torch.no_grad()
@pytest.mark.parametrize("reset_state", [False, True])
def test_bits_per_byte(data, stream, reset_state):
    scored, rows = model(), (len(stream) - 1) // ROW
    assert data.index.bos in stream[1:]
    want = by_hand(scored, data, stream, rows, reset_state)
    for batch_size in (1, 3, 100):
        measure = validation_bits(data, seq_len=ROW, batch_size=batch_size, reset_state=reset_state)
        assert measure(scored) == pytest.approx(want, rel=1e-5)


@torch.no_grad()
def test_only_so_many_tokens(data, stream):
    scored = model()
    found = validation_bits(data, seq_len=ROW, batch_size=2, tokens=3 * ROW + 1)(scored)
    assert found == pytest.approx(by_hand(scored, data, stream, 3), rel=1e-5)
