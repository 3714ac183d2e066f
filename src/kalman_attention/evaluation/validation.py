"""Bits per byte of a validation split, as monitored during training.

The loss in nats, summed over the targets that are not special tokens and divided by (ln 2 x their
bytes), which is comparable across tokenizers. Rows are windows of the text, so that a token is
predicted from at most one row; ``kla eval`` instead scores whole documents, each token with
everything before it.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from kalman_attention.data.loader import Batch, WindowLoader
from kalman_attention.data.shards import VALIDATION, ShardedTokens
from kalman_attention.evaluation.detection import Calibration, calibrate
from kalman_attention.evaluation.scores import score_predictions
from kalman_attention.losses import posterior_mean_cross_entropy
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.uncertainty import predict

_POSITIONS = 128  # decoded at once, which bounds the memory for logits


def validation_bits(
    data: ShardedTokens,
    *,
    seq_len: int,
    batch_size: int,
    tokens: int | None = None,
    reset_state: bool = False,
) -> Callable[[nn.Module], dict[str, float]]:
    """A function that measures language models on the validation split, by the posterior mean.

    Args:
        data: the opened shards, with their tokenizer.
        seq_len: tokens of a row.
        batch_size: rows per forward pass; does not change the result.
        tokens: maximum number of tokens to score, in evenly spaced rows; None for all whole rows.
        reset_state: forget at document boundaries.

    Returns:
        A function of the model that returns ``bits_per_byte`` and ``loss``, nats per scored token.
    """
    sizes = torch.from_numpy(data.tokenizer().token_bytes())
    available = data.index.total("tokens", VALIDATION)
    wanted = available if tokens is None else min(tokens, available)
    rows = max(1, (wanted - 1) // seq_len)

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert isinstance(model, LanguageModel)
        bytes_of = sizes.to(model.embedding.weight.device)
        nats, size, count = 0.0, 0, 0
        for batch in _rows(data, seq_len, batch_size, rows):
            hidden, targets = _read(model, batch, reset_state)
            losses = posterior_mean_cross_entropy(
                model.head_logits, hidden, targets, reduction="none"
            )
            lengths = bytes_of[targets]
            nats += losses[lengths > 0].double().sum().item()
            size += int(lengths.sum())
            count += int((lengths > 0).sum())
        return {"bits_per_byte": nats / (math.log(2) * size), "loss": nats / count}

    return evaluate


@torch.no_grad()
def validation_calibration(
    model: LanguageModel,
    data: ShardedTokens,
    *,
    seq_len: int,
    batch_size: int,
    reset_state: bool = False,
) -> Calibration:
    """Calibration of a model on all whole rows of the validation split.

    Args:
        model: the model.
        data: the opened shards, with their tokenizer.
        seq_len: tokens of a row.
        batch_size: rows per forward pass; does not change the result.
        reset_state: forget at document boundaries.
    """
    text = torch.from_numpy(data.tokenizer().token_bytes()) > 0
    rows = max(1, (data.index.total("tokens", VALIDATION) - 1) // seq_len)
    confidence, correct = [], []
    for batch in _rows(data, seq_len, batch_size, rows):
        hidden, targets = _read(model, batch, reset_state)
        pieces = torch.split(hidden, _POSITIONS, 1)
        for piece, wanted in zip(pieces, torch.split(targets, _POSITIONS, 1), strict=True):
            scores = score_predictions([predict(model.head_logits(piece))], wanted)
            counted = text.to(wanted.device)[wanted]
            confidence.append(scores["max_prob"][counted].double().cpu())
            correct.append(scores["correct"][counted].double().cpu())
    return calibrate(torch.cat(confidence).numpy(), torch.cat(correct).numpy())


def _read(model: LanguageModel, batch: Batch, reset_state: bool) -> tuple[Tensor, Tensor]:
    """The input of the head for a batch, and its targets."""
    placed = Batch(*(x.to(model.embedding.weight.device) for x in batch))
    inputs, targets, borders = placed.packed() if reset_state else (*placed[:2], None)
    return model(inputs, cu_seqlens=borders, logits_to_keep=0).hidden, targets


def _rows(data: ShardedTokens, seq_len: int, batch_size: int, rows: int) -> Iterator[Batch]:
    """A number of rows of the split, in batches.

    Rows are evenly spaced, because the first documents may be easier or harder than the others.
    """
    loader = WindowLoader(data, batch_size, seq_len, split=VALIDATION, lanes=rows)
    for begin in range(0, rows, batch_size):
        batch = next(loader)
        yield Batch(*(x[: rows - begin] for x in batch))
