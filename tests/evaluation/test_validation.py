"""Bits per byte of a validation split, against a loop over its tokens."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")

from kalman_attention.data.shards import VALIDATION, ShardedTokens
from kalman_attention.evaluation.detection import calibrate
from kalman_attention.evaluation.validation import validation_bits, validation_calibration
from tests.data.small import shards
from tests.evaluation.checkpoints import model

ROW = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return ShardedTokens(shards(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module")
def stream(data):
    return [t for s in data.shards(VALIDATION) for t in data.tokens(s).tolist()]


def one_by_one(scored, data, stream, rows, reset_state=False):
    """Log-probabilities at every target that is no special token, the target, and its bytes."""
    sizes, bos = data.tokenizer().token_bytes(), data.index.bos
    apart = len(stream) // rows
    for row in range(rows):
        ids = stream[apart * row : apart * row + ROW + 1]
        for place in range(ROW):
            seen = ids[: place + 1]
            if reset_state and bos in seen:
                seen = seen[len(seen) - 1 - seen[::-1].index(bos) :]
            if sizes[ids[place + 1]]:
                logits = scored(torch.tensor([seen])).logits[0, -1]
                yield logits.log_softmax(-1), ids[place + 1], int(sizes[ids[place + 1]])


def by_hand(*args):
    """Protocol: nats over targets that are no special tokens, over ln 2 times their bytes."""
    nats = size = count = 0
    for log_probs, target, length in one_by_one(*args):
        nats -= log_probs[target].item()
        size += length
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
@pytest.mark.parametrize("reset_state", [False, True])
def test_calibration(data, stream, reset_state):
    pytest.importorskip("sklearn")
    pytest.importorskip("torchmetrics")
    scored, rows = model(), (len(stream) - 1) // ROW
    every = list(one_by_one(scored, data, stream, rows, reset_state))
    confidence = np.array([float(log_probs.exp().max()) for log_probs, _, _ in every])
    correct = np.array([float(log_probs.argmax() == target) for log_probs, target, _ in every])
    found = validation_calibration(scored, data, seq_len=ROW, batch_size=3, reset_state=reset_state)
    assert found == pytest.approx(calibrate(confidence, correct), rel=1e-4)
    assert found.tokens == len(every)


@torch.no_grad()
def test_only_so_many_tokens(data, stream):
    scored = model()
    found = validation_bits(data, seq_len=ROW, batch_size=2, tokens=3 * ROW + 1)(scored)
    assert found == pytest.approx(by_hand(scored, data, stream, 3), rel=1e-5)
