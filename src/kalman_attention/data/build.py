"""Tokenise documents into shards: in parallel, in order, and resumable.

The result depends only on the documents and the options, not on the number of workers or on
interruptions. A shard is finished when its small ``.json`` file exists, which is written last.
"""

import contextlib
import os
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kalman_attention._files import sweep, write_json
from kalman_attention._progress import Progress
from kalman_attention._reading import from_dict, read_json
from kalman_attention.data.encoding import BATCH_CHARACTERS, beginning, divide, encode_all
from kalman_attention.data.shards import (
    INDEX,
    TRAIN,
    VALIDATION,
    Encoded,
    Index,
    Shard,
    check_contents,
    check_sizes,
    token_dtype,
    write_shard,
)
from kalman_attention.data.sources import Corpus, documents
from kalman_attention.data.tokenizer import (
    BYTE_VOCABULARY,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Tokenizer,
    train_tokenizer,
)

PLAN = "build.json"
LAST = 0

# A small corpus would otherwise give its only shard, all of its text, to validation.
_LARGEST_SHARE = 0.05
# The vocabulary of the paper's recipe; and about a hundred tokens of text per entry, because an
# embedding that is hardly ever seen is hardly trained.
_LARGEST_VOCABULARY, _BYTES_PER_ENTRY = 32_768, 512


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of a build.

    Attributes:
        corpus: the documents.
        tokenizer: folder, file or hub name of a tokenizer; None trains one.
        bos: start-of-text token of that tokenizer, if its configuration does not name one.
        vocab_size: vocabulary size of a trained tokenizer; None for one that suits the size of the
            corpus, see ``default_vocabulary``.
        tokenizer_characters: maximum number of characters that it is trained on.
        shard_tokens: tokens of a shard; the document that reaches this number is its last.
        validation: 0 uses the last shard for validation (half a shard or more of a large corpus,
            the last twentieth of a small one, for which a document may be split at a line end);
            n > 1 uses every n-th document.
    """

    corpus: Corpus
    tokenizer: str | None = None
    bos: str | None = None
    vocab_size: int | None = None
    tokenizer_characters: int = 2_000_000_000
    shard_tokens: int = 1 << 23
    validation: int = LAST

    def __post_init__(self) -> None:
        if self.shard_tokens < 1:
            raise ValueError(f"shard_tokens must be at least 1, got {self.shard_tokens}.")
        if self.validation < 0 or self.validation == 1:
            raise ValueError(
                "validation must be 0 (the last shard) or n > 1 (every n-th document), got "
                f"{self.validation}."
            )

    def split_of(self, place: int) -> str:
        """The split of a document of the corpus; with ``LAST``, all are train at first."""
        held_out = self.validation and place % self.validation == self.validation - 1
        return VALIDATION if held_out else TRAIN

    def rule(self) -> str:
        """Description of how documents are divided."""
        return f"every {self.validation}th document" if self.validation else "last shard"


def default_vocabulary(size: int) -> int:
    """Vocabulary size of a tokenizer for a corpus of ``size`` bytes, 0 if unknown.

    The largest power of two that leaves 512 bytes of text for each entry, at most 32,768. Less than
    256 KiB of text is read byte by byte.

    >>> default_vocabulary(100_000), default_vocabulary(1_800_000), default_vocabulary(10**9)
    (265, 2048, 32768)
    """
    fitting = 1 << (size // _BYTES_PER_ENTRY).bit_length() >> 1
    return min(_LARGEST_VOCABULARY, max(BYTE_VOCABULARY, fitting)) if size else _LARGEST_VOCABULARY


def build(
    folder: str | os.PathLike[str],
    options: BuildOptions,
    *,
    workers: int | None = None,
    quiet: bool = False,
) -> Index:
    """Tokenise a corpus into shards; call it again to resume after an interruption.

    Args:
        folder: output folder; created if missing.
        options: options of the build.
        workers: number of worker processes; None for one per core.
        quiet: do not show progress.

    Returns:
        The index of the finished folder.
    """
    folder = Path(folder)
    options.corpus.check()
    sources = options.corpus.describe()
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    _agree_on_plan(folder, {**asdict(options), "sources": sources})
    sweep(folder)
    try:
        return _build(folder, options, sources, workers, quiet)
    except ValueError:
        _forget(folder, new)
        raise


def _build(
    folder: Path,
    options: BuildOptions,
    sources: list[dict[str, Any]],
    workers: int | None,
    quiet: bool,
) -> Index:
    """``build`` in a folder whose plan has been checked."""
    size = sum(source.get("bytes", 0) for source in sources)
    tokenizer = _tokenizer(folder, options, size)
    if (folder / INDEX).is_file():
        return _finished(folder, tokenizer)
    progress = None if quiet else Progress("tokenising", size or None)
    shards = _write_all(folder, options, tokenizer, workers or _enough(size), progress)
    index = Index(
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        bos=tokenizer.bos,
        dtype=token_dtype(tokenizer.vocab_size),
        split=options.rule(),
        sources=sources,
        shards=shards,
    )
    index.write(folder)
    return index


def _forget(folder: Path, new: bool) -> None:
    """Remove the files of a failed build, unless it already wrote shards."""
    if _has_shards(folder):
        return
    for name in (PLAN, TOKENIZER, TOKENIZER_CONFIG):
        (folder / name).unlink(missing_ok=True)
    if new:
        with contextlib.suppress(OSError):  # another program may have put a file there
            folder.rmdir()


def _enough(size: int) -> int:
    """One process per core, but no more than there are batches."""
    cores = os.cpu_count() or 1
    return min(cores, size // BATCH_CHARACTERS + 1) if size else cores


def _agree_on_plan(folder: Path, plan: dict[str, Any]) -> None:
    path = folder / PLAN
    if not path.is_file():
        if (folder / TOKENIZER).is_file():
            raise ValueError(
                f"{folder} contains a tokenizer that `kla data` did not write. Choose another "
                f"folder; to use that tokenizer, add --tokenizer {folder}."
            )
        return write_json(path, plan)
    begun = read_json(path)
    now = {**plan, "corpus": {**plan["corpus"], "inputs": list(plan["corpus"]["inputs"])}}
    changed = [name for name in now if begun.get(name) != now[name]]
    if changed and _has_shards(folder):
        raise ValueError(
            f"{folder} was started with another {' and another '.join(changed)}. Choose another "
            "folder, or delete this one to build it again."
        )
    if changed:  # nothing of value without shards, and the tokenizer may not match
        for name in (TOKENIZER, TOKENIZER_CONFIG):
            (folder / name).unlink(missing_ok=True)
        write_json(path, plan)


def _has_shards(folder: Path) -> bool:
    notes = (folder.glob(f"{split}_*.json") for split in (TRAIN, VALIDATION))
    return (folder / INDEX).exists() or any(path for found in notes for path in found)


def _tokenizer(folder: Path, options: BuildOptions, size: int) -> Tokenizer:
    if (folder / TOKENIZER).is_file():
        return Tokenizer.load(folder)
    if options.tokenizer is not None:
        found = Tokenizer.load(options.tokenizer, bos=options.bos)
    else:
        texts = (
            document.text
            for place, document in enumerate(documents(options.corpus))
            if options.split_of(place) == TRAIN
        )
        found = train_tokenizer(
            texts,
            options.vocab_size or default_vocabulary(size),
            max_characters=options.tokenizer_characters,
            fewer=options.vocab_size is None,
        )
    found.save(folder)
    return found


def _finished(folder: Path, tokenizer: Tokenizer) -> Index:
    index = Index.read(folder)
    for shard in index.shards:
        check_sizes(folder, shard, index.dtype)
    if index.tokenizer != tokenizer.fingerprint:
        raise ValueError(f"{folder / TOKENIZER} is not the tokenizer that made the shards there.")
    return index


def _write_all(
    folder: Path,
    options: BuildOptions,
    tokenizer: Tokenizer,
    workers: int,
    progress: Progress | None,
) -> list[Shard]:
    """Write the missing shards, and return all of them."""
    writers = {split: _Writer(folder, split, options, tokenizer) for split in (TRAIN, VALIDATION)}
    if options.validation == LAST:
        writers[VALIDATION].restart()  # chosen again: it follows the last shard for training
        begin = writers[TRAIN].next
    else:
        begin = min(writer.next for writer in writers.values())
    done = sum(writer.bytes for writer in writers.values())
    with closing(encode_all(folder, options.corpus, begin, tokenizer, workers)) as stream:
        for encoded in stream:
            writers[options.split_of(encoded.next - 1)].add(encoded)
            done += encoded.bytes
            if progress:
                progress.update(done, f"{sum(len(w.shards) for w in writers.values())} shards")
    if progress:
        progress.close()
    if options.validation == LAST:
        writers[TRAIN].give_last(writers[VALIDATION])
    _check_division(writers)
    for writer in writers.values():
        writer.close()
    return [shard for writer in writers.values() for shard in writer.shards]


def _check_division(writers: dict[str, "_Writer"]) -> None:
    """Raise an error if a split has no documents, before the last shards are written."""
    count = {split: writer.documents for split, writer in writers.items()}
    if not any(count.values()):
        raise ValueError("the corpus is empty: none of its documents has any text.")
    for split, found in count.items():
        if not found:
            raise ValueError(
                f"no document is left for {split}: the corpus has {sum(count.values())} in total. "
                "Add more, split them into smaller ones (a separator, fewer bytes per document), "
                "or choose another validation."
            )


class _Cut(NamedTuple):
    """A number of documents to take from the front, and their tokens."""

    documents: int
    tokens: int


class _Writer:
    """Collects the documents of a split and writes shard after shard."""

    def __init__(
        self, folder: Path, split: str, options: BuildOptions, tokenizer: Tokenizer
    ) -> None:
        self.folder, self.split, self.tokenizer = folder, split, tokenizer
        self.fingerprint = tokenizer.fingerprint
        self.budget = options.shard_tokens
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.waiting: list[Encoded] = []
        self.tokens = 0
        self.restart()
        while (found := self._kept()) is not None:
            shard, self.next, self.taken = found
            self.shards.append(shard)

    def restart(self) -> None:
        """Ignore what an earlier run wrote."""
        self.shards: list[Shard] = []
        self.next = self.taken = 0  # next document, and its tokens that are already written

    @property
    def bytes(self) -> int:
        """Bytes of text in the shards that are written."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def documents(self) -> int:
        """Number of documents, written or waiting."""
        return len(self.waiting) + sum(shard.documents for shard in self.shards)

    def add(self, encoded: Encoded) -> None:
        """Add a document, or the part of it that no earlier run has written."""
        if encoded.next <= self.next or len(encoded.tokens) == 1:
            return
        if encoded.next == self.next + 1 and self.taken:
            _, encoded = divide(encoded, self.taken, self.tokenizer)
        self.waiting.append(encoded)
        self.tokens += len(encoded.tokens)
        # Half a shard is held back, so that the last one is never a small remainder.
        if self.tokens >= 1.5 * self.budget:  # a full shard, and half of the next
            cut = self._first(self.budget)
            if cut.tokens >= self.budget and self.tokens - cut.tokens >= self.budget / 2:
                self._write(cut)

    def give_last(self, other: "_Writer") -> None:
        """Pass the last shard to another writer, but at most a twentieth of all tokens."""
        total = self.tokens + sum(shard.tokens for shard in self.shards)
        share = max(int(_LARGEST_SHARE * total), 2)  # start of text and at least one token
        if self.tokens > share:
            cut = self._first(self.tokens - share)
            if self.tokens - cut.tokens > share:  # the last document alone is too long
                cut = self._cut_last(share)
            self._write(cut)
        if self.shards:
            other.waiting, other.tokens = self.waiting, self.tokens
            self.waiting, self.tokens = [], 0

    def close(self) -> None:
        """Write the remaining documents."""
        if self.waiting:
            self._write(_Cut(len(self.waiting), self.tokens))

    def _first(self, budget: int) -> "_Cut":
        """The first documents up to a budget of tokens; takes at least one and leaves one."""
        count = tokens = 0
        while tokens < max(budget, 1) and count < len(self.waiting) - 1:
            tokens += len(self.waiting[count].tokens)
            count += 1
        return _Cut(count, tokens)

    def _cut_last(self, share: int) -> "_Cut":
        """Split the last document so that at most ``share`` tokens remain; take the rest."""
        whole = self.waiting.pop()
        place = beginning(whole, len(whole.tokens) - share, self.tokenizer)
        head, tail = divide(whole, place, self.tokenizer)
        self.waiting += [head, tail]
        self.tokens += 1  # a second start of text
        return _Cut(len(self.waiting) - 1, self.tokens - len(tail.tokens))

    def _write(self, cut: "_Cut") -> None:
        chosen, self.waiting = self.waiting[: cut.documents], self.waiting[cut.documents :]
        self.tokens -= cut.tokens
        shard = write_shard(self.folder, self._name(), self.dtype, chosen)
        note = {
            "tokenizer": self.fingerprint,
            "next": chosen[-1].next,
            "taken": chosen[-1].taken,
            "shard": asdict(shard),
        }
        write_json(self._note(), note)
        self.shards.append(shard)

    def _name(self) -> str:
        return f"{self.split}_{len(self.shards):05}"

    def _note(self) -> Path:
        return self.folder / f"{self._name()}.json"

    def _kept(self) -> tuple[Shard, int, int] | None:
        """The next shard if an earlier run has finished it and it is intact."""
        if not self._note().is_file():
            return None
        try:
            note = read_json(self._note())
            shard = from_dict(Shard, note["shard"], str(self._note()))
            check_sizes(self.folder, shard, self.dtype)
            check_contents(self.folder, shard)
            found = shard, note["next"], note["taken"]
        except (ValueError, KeyError, TypeError):
            return None  # write it again
        return found if note["tokenizer"] == self.fingerprint else None
