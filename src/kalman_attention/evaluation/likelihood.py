"""Log-probabilities of continuations and of whole documents under a model."""

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention.losses import posterior_mean_cross_entropy
from kalman_attention.models.language_model import LanguageModel
from kalman_attention.models.uncertainty import predict, predict_marginal, predictions

_POSITIONS = 128  # decoded at once, which bounds the memory for logits


class Likelihood(NamedTuple):
    """Likelihood of a continuation.

    Attributes:
        log_prob: sum over its tokens, in nats.
        greedy: whether every token is the most likely one.
    """

    log_prob: float
    greedy: bool


@torch.no_grad()
def continuations(
    model: LanguageModel,
    requests: Sequence[tuple[list[int], list[int]]],
    *,
    batch_size: int = 16,
    max_length: int | None = None,
    num_samples: int = 0,
    seed: int = 0,
) -> Iterator[tuple[int, Likelihood]]:
    """Score continuations given contexts, longest first; results do not depend on the batch size.

    Args:
        model: the model.
        requests: token ids of contexts (not empty) and continuations.
        batch_size: rows per batch.
        max_length: maximum number of tokens the model reads; longer requests are cut on the left.
        num_samples: number of posterior samples (KLA+), for the log of the mean probability; 0
            uses the posterior mean.
        seed: seed of the samples; every request has its own stream, independent of the others.

    Yields:
        The index in ``requests``, and the likelihood.
    """
    device = model.embedding.weight.device
    order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
    for begin in range(0, len(order), batch_size):
        chosen = order[begin : begin + batch_size]
        texts = [_clip(*requests[i], max_length) for i in chosen]
        rows = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = torch.tensor(text)  # padding on the right changes nothing before it
        spans = [
            slice(len(text) - len(requests[i][1]), len(text))
            for i, text in zip(chosen, texts, strict=True)
        ]
        targets = [torch.tensor(requests[i][1], device=device) for i in chosen]
        seeds = [_own_seed(seed, requests[i]) for i in chosen] if num_samples else None
        decoded = _decode(model, rows.to(device), spans, targets, num_samples, seeds)
        yield from zip(chosen, decoded, strict=True)


def _clip(context: list[int], continuation: list[int], most: int | None) -> list[int]:
    """The input of the model: all but the last token, cut on the left if it is too long."""
    whole = (context + continuation)[:-1]
    if most is None or len(whole) <= most:
        return whole
    if len(continuation) > most:
        raise ValueError(
            f"a continuation of {len(continuation)} tokens does not fit into {most}: raise the "
            "maximal length."
        )
    return whole[-most:]


def _decode(
    model: LanguageModel,
    rows: Tensor,
    spans: list[slice],
    targets: list[Tensor],
    num_samples: int,
    seeds: list[int] | None,
) -> Iterator[Likelihood]:
    """Decode the scored positions only, for all rows together."""

    def pick(x: Tensor) -> Tensor:
        return torch.cat([x[i, span] for i, span in enumerate(spans)])

    kept: tuple[Tensor, ...]
    if seeds is None:
        kept = (pick(model(rows, logits_to_keep=0).hidden),)
    else:
        read = model.read(rows)
        drawn = [
            read.map(itemgetter((i, s))).sample(num_samples, _generator(model, seed))
            for i, (s, seed) in enumerate(zip(spans, seeds, strict=True))
        ]
        kept = (torch.cat(drawn, 1).transpose(0, 1), *(pick(x) for x in read.context))
    every, log_probs, hits = torch.cat(targets), [], []
    parts = (torch.split(x, _POSITIONS) for x in (every, *kept))
    for wanted, first, *context in zip(*parts, strict=True):
        if seeds is None:
            found = predict(model.head_logits(first)).log_probs
        else:
            found = predict_marginal(model.write(first.transpose(0, 1), *context)).log_probs
        log_probs.append(found.gather(-1, wanted.unsqueeze(-1)).squeeze(-1))
        hits.append(found.argmax(-1) == wanted)
    sizes = [len(target) for target in targets]
    sums = torch.split(torch.cat(log_probs).double(), sizes)
    greedy = torch.split(torch.cat(hits), sizes)
    for total, hit in zip(sums, greedy, strict=True):
        yield Likelihood(_finite(total.sum().item()), bool(hit.all()))


def _finite(nats: float) -> float:
    """Check a log-probability: a model with finite weights may still overflow."""
    if math.isfinite(nats):
        return nats
    raise FloatingPointError(
        f"the model gives a text a log-probability of {nats}: its outputs are not finite. Its "
        "weights are damaged, or its training has diverged."
    )


def _own_seed(seed: int, request: tuple[list[int], list[int]]) -> int:
    return seed + zlib.crc32(repr(request).encode())


def _generator(model: LanguageModel, seed: int) -> torch.Generator:
    return torch.Generator(model.embedding.weight.device).manual_seed(seed)


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """Score of a text.

    Attributes:
        nats: negative log-probability.
        tokens: number of predicted tokens, without the start of text.
        bytes: length of the text in bytes, as UTF-8.
    """

    nats: float
    tokens: int
    bytes: int

    def __add__(self, other: "TextScore") -> "TextScore":
        """The score of both texts together."""
        return TextScore(
            nats=self.nats + other.nats,
            tokens=self.tokens + other.tokens,
            bytes=self.bytes + other.bytes,
        )

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte, comparable across tokenizers."""
        return self.nats / (math.log(2) * self.bytes) if self.bytes else math.nan

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.nats / self.tokens) if self.tokens else math.nan


@torch.no_grad()
def document_nats(
    model: LanguageModel,
    bos: int,
    tokens: Sequence[int],
    *,
    chunk: int = 2048,
    stride: int | None = None,
    num_samples: int = 0,
    seed: int = 0,
) -> float:
    """Negative log-probability of a document after start of text, in nats.

    Args:
        model: the model.
        bos: start-of-text token.
        tokens: the document, without start of text.
        chunk: number of tokens per forward pass.
        stride: None carries the state from chunk to chunk, so that every token is predicted from
            all tokens before it. A number uses sliding windows instead: windows of ``chunk``
            tokens, ``stride`` tokens apart and each with its own start of text, which score the
            tokens that no earlier window has scored.
        num_samples: number of posterior samples (KLA+); 0 uses the posterior mean.
        seed: seed of the samples.
    """
    if chunk < 1 or (stride is not None and not 1 <= stride <= chunk):
        raise ValueError(f"windows of {chunk} tokens cannot have a stride of {stride}.")
    generator = _generator(model, seed) if num_samples else None
    ids = torch.tensor([bos, *tokens], device=model.embedding.weight.device).unsqueeze(0)
    nats, scored = 0.0, 0
    states = None
    step = chunk if stride is None else stride
    begin = 0
    while scored < len(tokens):
        end = min(begin + chunk, len(tokens))
        inputs = ids[:, begin:end].clone()
        if stride is not None:
            inputs[:, 0] = bos
        found = inputs.new_full(inputs.shape, -100)
        found[:, scored - begin :] = ids[:, scored + 1 : end + 1]
        loss, states = _chunk_nats(model, inputs, found, states, num_samples, generator)
        nats += loss
        scored, begin = end, begin + step
        states = states if stride is None else None
    return _finite(nats)


def _chunk_nats(
    model: LanguageModel,
    inputs: Tensor,
    targets: Tensor,
    states: tuple[object, ...] | None,
    num_samples: int,
    generator: torch.Generator | None,
) -> tuple[float, tuple[object, ...]]:
    if not num_samples:
        found = model(inputs, states=states, logits_to_keep=0)
        loss = posterior_mean_cross_entropy(
            model.head_logits, found.hidden, targets, chunk_size=_POSITIONS, reduction="sum"
        )
        return loss.item(), found.states
    read = model.read(inputs, states=states)
    parts = predictions(
        model, read, num_samples=num_samples, generator=generator, chunk_size=_POSITIONS
    )
    nats = 0.0
    for part, wanted in zip(parts, torch.split(targets, _POSITIONS, 1), strict=True):
        log_probs = part.log_probs.gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        nats -= log_probs[wanted >= 0].double().sum().item()
    return nats, read.state
