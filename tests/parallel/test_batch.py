"""Which part of a batch a rank works on."""

from typing import NamedTuple

import pytest
import torch

from kalman_attention.parallel.batch import named_tensors, piece, share_rows
from kalman_attention.train import token_loss
from tests.models.small import small, text


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shares_are_the_batch(rows, ranks):
    batch = {"a": [Pair(torch.arange(rows), torch.rand(rows, 2))]}
    shares = [share_rows(batch, i, ranks) for i in range(ranks)]
    counts = [share.rows for share in shares]
    assert sum(counts) == rows
    assert max(counts) - min(counts) <= 1
    for place, whole in named_tensors(batch):
        parts = [dict(named_tensors(s.batch))[place] for s in shares]
        assert torch.equal(torch.cat([p for p, n in zip(parts, counts, strict=True) if n]), whole)
        assert all(len(part) == max(1, n) for part, n in zip(parts, counts, strict=True))
    assert isinstance(shares[0].batch["a"][0], Pair)


@pytest.mark.parametrize(
    "batch",
    [
        (torch.rand(2), torch.rand(3)),
        torch.tensor(1.0),
        {"a": 3},
        (torch.rand(2), torch.tensor(1)),
    ],
)
def test_what_cannot_be_shared(batch):
    with pytest.raises(ValueError, match="same first axis"):
        share_rows(batch, 0, 2)


@pytest.mark.parametrize("T", [0, 1, 2, 5, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_pieces_are_the_sequence(T, ranks):
    x = torch.rand(2, T, 3)
    pieces = [piece(x, i, ranks) for i in range(ranks)]
    assert torch.equal(torch.cat(pieces, 1), x)
    lengths = [p.shape[1] for p in pieces]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("kind", ["mean", "marginal"])
def test_the_total_of_the_token_loss_is_its_mean_times_its_count(kind):
    model, tokens = small().double(), text(3, 9)
    tokens[0, 4:] = -100
    batch = (tokens[:, :-1].clamp(min=0), tokens[:, 1:])
    loss = token_loss(kind, num_samples=2)
    generator = torch.Generator()
    mean = loss(model, batch, generator.manual_seed(0))
    total, count = loss.total(model, batch, generator.manual_seed(0))
    assert count == 3 * 8 - 5
    torch.testing.assert_close(total, mean * count)


def test_targets_are_shifted_before_the_cut():
    tokens = text(2, 8)
    parts = [token_loss().piece([tokens], i, 3) for i in range(3)]
    assert torch.equal(torch.cat([x for x, _ in parts], 1), tokens[:, :-1])
    assert torch.equal(torch.cat([y for _, y in parts], 1), tokens[:, 1:])
