"""Tokenise documents with several processes, preserving their order."""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from kalman_attention._processes import worker_processes
from kalman_attention.data.shards import Encoded, Tokens, token_dtype
from kalman_attention.data.sources import Corpus, Document, documents
from kalman_attention.data.tokenizer import Tokenizer

# Large enough to hide the cost of passing a batch to a worker and back.
BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 1024

_Flat = tuple[Tokens, Tokens]


def encode_all(
    folder: Path, corpus: Corpus, begin: int, tokenizer: Tokenizer, workers: int
) -> Generator[Encoded, None, None]:
    """Tokens of the documents from index ``begin`` on, in order."""
    place = begin
    batches = _batches(documents(corpus, begin))
    found = _encoded_batches(folder, tokenizer, batches, workers)
    with closing(found):
        for batch, tokens in found:
            for document, ids in zip(batch, _cut(tokens), strict=True):
                place += 1
                yield Encoded(ids, len(document.text.encode()), document.replaced, place)


def divide(whole: Encoded, place: int, tokenizer: Tokenizer) -> tuple[Encoded, Encoded]:
    """Split a document after its first ``place`` tokens, not counting start of text."""
    cut = 1 + place
    head, tail = whole.tokens[:cut], np.concatenate([whole.tokens[:1], whole.tokens[cut:]])
    size = min(whole.bytes, len(tokenizer.decode(head[1:].tolist()).encode()))
    return (
        Encoded(head, size, whole.replaced, whole.next - 1, place),
        Encoded(tail, whole.bytes - size, 0, whole.next),
    )


def beginning(whole: Encoded, least: int, tokenizer: Tokenizer) -> int:
    """The best position to ``divide`` a document, at ``least`` or soon after.

    Before a line, if one begins in the first half of the remaining tokens, otherwise before a word,
    otherwise before a character.
    """

    def shown(begin: int, end: int) -> str:
        return tokenizer.decode(whole.tokens[1 + begin : 1 + end].tolist())

    last = len(whole.tokens) - 2  # leaves one token
    places = range(least, least + (last - least) // 2 + 1)
    kinds: tuple[Callable[[int], bool], ...] = (
        lambda place: shown(place - 1, place).endswith("\n"),
        lambda place: shown(place, place + 1)[:1].isspace(),
        # A character has at most four bytes; a part of one is decoded as U+FFFD.
        lambda place: not shown(max(0, place - 4), place).endswith("\ufffd"),
    )
    found = (place for suits in kinds for place in places if suits(place))
    return next(found, least)


def _batches(stream: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in stream:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS or len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded_batches(
    folder: Path, tokenizer: Tokenizer, batches: Iterator[list[Document]], workers: int
) -> Generator[tuple[list[Document], _Flat], None, None]:
    """Batches with their tokens; a single worker runs in this process."""
    if workers == 1:
        for batch in batches:
            yield batch, _encode(tokenizer, batch)
        return
    with worker_processes(workers, partial(_start_worker, str(folder))) as processes:
        yield from processes.in_order(_encode_in_worker, batches)


def _encode(tokenizer: Tokenizer, batch: Sequence[Document]) -> _Flat:
    """Concatenated tokens of all documents, each after start of text, and their lengths."""
    dtype = token_dtype(tokenizer.vocab_size)
    texts = [document.text for document in batch]
    found = [np.array([tokenizer.bos, *ids], dtype) for ids in tokenizer.encode_batch(texts)]
    return np.concatenate(found), np.array([len(ids) for ids in found])


def _cut(flat: _Flat) -> list[Tokens]:
    tokens, lengths = flat
    ends = lengths.cumsum().tolist()
    return [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


_worker_tokenizer: Tokenizer | None = None


def _start_worker(folder: str) -> None:
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = Tokenizer.load(folder)


def _encode_in_worker(batch: Sequence[Document]) -> _Flat:
    assert _worker_tokenizer is not None
    return _encode(_worker_tokenizer, batch)
