"""Bits per byte of a validation split, as it is watched during training.

Nats over the targets that are no special tokens, over (ln 2 x their bytes): comparable between
tokenizers. Rows are windows of the text, so a token sees at most one row before it; ``kla eval``
scores documents one by one instead, with all that precedes.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import nn

from kalman_attention.data.loader import Batch, WindowLoader
from kalman_attention.data.shards import VALIDATION, ShardedTokens
from kalman_attention.losses import posterior_mean_cross_entropy
from kalman_attention.models.language_model import LanguageModel


def validation_bits(
    data: ShardedTokens,
    *,
    seq_len: int,
    batch_size: int,
    tokens: int | None = None,
    reset_state: bool = False,
) -> Callable[[nn.Module], dict[str, float]]:
    """A measurement of language models on the validation split, by the posterior mean.

    Args:
        data: the opened shards, with their tokenizer.
        seq_len: tokens of a row.
        batch_size: rows that go through the model at a time; changes nothing else.
        tokens: score this many at most, in rows evenly apart; None for all whole rows.
        reset_state: forget at the borders of documents.

    Returns:
        A function of the model that gives ``bits_per_byte`` and ``loss``, nats per scored token.
    """
    sizes = torch.from_numpy(data.tokenizer().token_bytes())
    available = data.index.total("tokens", VALIDATION)
    wanted = available if tokens is None else min(tokens, available)
    rows = max(1, (wanted - 1) // seq_len)

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert isinstance(model, LanguageModel)
        device = model.embedding.weight.device
        bytes_of = sizes.to(device)
        nats, size, count = 0.0, 0, 0
        for batch in _rows(data, seq_len, batch_size, rows):
            placed = Batch(*(x.to(device) for x in batch))
            inputs, targets, borders = placed.packed() if reset_state else (*placed[:2], None)
            found = model(inputs, cu_seqlens=borders, logits_to_keep=0)
            losses = posterior_mean_cross_entropy(
                model.head_logits, found.hidden, targets, reduction="none"
            )
            lengths = bytes_of[targets]
            nats += losses[lengths > 0].double().sum().item()
            size += int(lengths.sum())
            count += int((lengths > 0).sum())
        return {"bits_per_byte": nats / (math.log(2) * size), "loss": nats / count}

    return evaluate


def _rows(data: ShardedTokens, seq_len: int, batch_size: int, rows: int) -> Iterator[Batch]:
    """A number of rows of the split, in batches.

    Evenly apart and not the first: the first documents may be easier, or harder, than the others.
    """
    loader = WindowLoader(data, batch_size, seq_len, split=VALIDATION, lanes=rows)
    for begin in range(0, rows, batch_size):
        batch = next(loader)
        yield Batch(*(x[: rows - begin] for x in batch))
