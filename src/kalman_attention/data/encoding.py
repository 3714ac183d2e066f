"""Documents into tokens by several processes, in the order of the documents."""

import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

import numpy as np

from kalman_attention.data.shards import Encoded, Tokens, token_dtype
from kalman_attention.data.sources import Corpus, Document, documents
from kalman_attention.data.tokenizer import Tokenizer

BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 1024

_Flat = tuple[Tokens, Tokens]


def encode_all(
    folder: Path, corpus: Corpus, begin: int, tokenizer: Tokenizer, workers: int
) -> Iterator[Encoded]:
    """Documents from a place on, as tokens, in order."""
    place = begin
    batches = _batches(documents(corpus, begin))
    with _pool(folder, workers) as pool:
        for batch, tokens in _in_order(pool, tokenizer, batches, 2 * workers):
            for document, ids in zip(batch, tokens, strict=True):
                place += 1
                yield Encoded(ids, len(document.text.encode()), document.replaced, place)


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


def _in_order(
    pool: ProcessPoolExecutor | None,
    tokenizer: Tokenizer,
    batches: Iterator[list[Document]],
    most: int,
) -> Iterator[tuple[list[Document], list[Tokens]]]:
    """Batches with their tokens; ``most`` of them are under way at a time."""
    if pool is None:
        for batch in batches:
            yield batch, _cut(_encode(tokenizer, [document.text for document in batch]))
        return
    running: deque[tuple[list[Document], Future[_Flat]]] = deque()
    for batch in batches:
        texts = [document.text for document in batch]
        running.append((batch, pool.submit(_encode_in_worker, texts)))
        if len(running) == most:
            first, future = running.popleft()
            yield first, _cut(future.result())
    for batch, future in running:
        yield batch, _cut(future.result())


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> _Flat:
    """Tokens of all texts in a row, start of text before each, and their lengths."""
    dtype = token_dtype(tokenizer.vocab_size)
    found = [np.array([tokenizer.bos, *ids], dtype) for ids in tokenizer.encode_batch(texts)]
    return np.concatenate(found), np.array([len(ids) for ids in found])


def _cut(flat: _Flat) -> list[Tokens]:
    tokens, lengths = flat
    ends = lengths.cumsum().tolist()
    return [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@contextmanager
def _pool(folder: Path, workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that tokenise; None for one worker, which is this process."""
    if workers == 1:
        yield None
        return
    context = get_context("spawn")  # forking a process that has threads is not safe
    pool = ProcessPoolExecutor(workers, context, _start_worker, (str(folder),))
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_worker_tokenizer: Tokenizer | None = None


def _start_worker(folder: str) -> None:
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says that it was interrupted
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = Tokenizer.load(folder)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed cannot tell its workers to stop."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(texts: Sequence[str]) -> _Flat:
    assert _worker_tokenizer is not None
    return _encode(_worker_tokenizer, texts)
