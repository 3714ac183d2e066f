"""Tokens on disk: memory-mapped shards, and the index that describes them.

For every shard a folder contains ``train_00000.bin`` (token ids; each document begins with the
start-of-text token) and ``train_00000.offsets`` (the start of every document, then the end), both
as little-endian integers. It also contains ``index.json``, which is written last and describes the
shards, and the tokenizer.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kalman_attention._files import sha256, whole_file, write_json
from kalman_attention._reading import from_dict, read_json
from kalman_attention.data.tokenizer import MOST_TOKENS, Tokenizer

FORMAT = 1
INDEX = "index.json"
TRAIN, VALIDATION = "train", "validation"
OFFSET_DTYPE = "<u8"
_DTYPES = ("<u2", "<u4")

_NAME = re.compile(r"[A-Za-z0-9_-]+")

Tokens = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard of a corpus.

    Attributes:
        name: name of its files, without suffix.
        split: ``"train"`` or ``"validation"``.
        documents: number of documents.
        tokens: number of tokens, including start of text.
        bytes: bytes of text, as UTF-8.
        damaged: number of documents that were not valid Unicode.
        replaced: number of places in them that became U+FFFD.
        sha256: checksum of the tokens.
        offsets_sha256: checksum of the offsets.
    """

    name: str
    split: str
    documents: int
    tokens: int
    bytes: int
    damaged: int
    replaced: int
    sha256: str
    offsets_sha256: str

    def __post_init__(self) -> None:
        # An index may come from elsewhere; its shards must be in its own folder.
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"{self.name!r} is not a valid name of a shard: it must name files next to the "
                "index, with letters, digits, - and _ only."
            )
        for name in ("documents", "tokens", "bytes", "damaged", "replaced"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class Index:
    """The contents of a folder of shards.

    Attributes:
        tokenizer: fingerprint of the tokenizer that made it.
        vocab_size: vocabulary size of that tokenizer.
        bos: its start-of-text token.
        dtype: dtype of the token ids, in numpy's notation.
        split: description of how documents were divided.
        sources: names and sizes of the files that were read.
        shards: the shards, in order.
    """

    tokenizer: str
    vocab_size: int
    bos: int
    dtype: str
    split: str
    sources: list[dict[str, Any]]
    shards: list[Shard]

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be {' or '.join(_DTYPES)}, got {self.dtype!r}.")
        if not 0 <= self.bos < self.vocab_size <= MOST_TOKENS:
            raise ValueError(
                f"0 <= bos < vocab_size <= {MOST_TOKENS:,} must hold, got {self.bos} and "
                f"{self.vocab_size}."
            )

    def total(self, what: str, split: str | None = None) -> int:
        """Sum of a field of ``Shard`` over the shards of a split, or over all."""
        chosen = (s for s in self.shards if split in (None, s.split))
        return sum(getattr(shard, what) for shard in chosen)

    def write(self, folder: Path) -> None:
        """Write ``index.json``."""
        totals = {what: self.total(what) for what in ("documents", "tokens", "bytes")}
        write_json(folder / INDEX, {"format": FORMAT, **totals, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> "Index":
        """Read ``index.json``."""
        if not folder.is_dir():
            raise ValueError(
                f"there is no folder {folder}. `kla data` creates one: without arguments from "
                "Python's standard library, in runs/data; from your own texts with `kla data "
                f"FILES --out {folder}`."
            )
        if not (folder / INDEX).exists():
            raise ValueError(
                f"{folder} has no {INDEX}: it is not a folder of shards, or `kla data` has not "
                "finished it. Run the same `kla data` command again to resume it."
            )
        data = read_json(folder / INDEX)
        if data.pop("format", None) != FORMAT:
            raise ValueError(f"{folder} was written by another version of the library.")
        for what in ("documents", "tokens", "bytes"):
            data.pop(what, None)  # totals, for human readers only
        return from_dict(cls, data, str(folder / INDEX))


def token_dtype(vocab_size: int) -> str:
    """The smallest type that holds every token id."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class Encoded(NamedTuple):
    """A document as tokens.

    Attributes:
        tokens: its token ids, start of text first.
        bytes: bytes of its text.
        replaced: number of places that were not valid Unicode.
        next: index in the corpus of the document after it; of the document itself, if this is only
            its first part.
        taken: tokens of that first part, without start of text; 0 for a complete document.
    """

    tokens: Tokens
    bytes: int
    replaced: int
    next: int
    taken: int = 0


def write_shard(folder: Path, name: str, dtype: str, documents: Sequence[Encoded]) -> Shard:
    """Write the files of one shard and return its entry; its name begins with the split."""
    lengths = np.array([len(each.tokens) for each in documents], dtype=OFFSET_DTYPE)
    offsets = np.concatenate([np.zeros(1, OFFSET_DTYPE), lengths.cumsum(dtype=OFFSET_DTYPE)])
    data, places = folder / f"{name}.bin", folder / f"{name}.offsets"
    with whole_file(data) as file:
        for each in documents:
            file.write(each.tokens.astype(dtype, copy=False).tobytes())
    with whole_file(places) as file:
        file.write(offsets.astype(OFFSET_DTYPE).tobytes())
    return Shard(
        name=name,
        split=name.rpartition("_")[0],
        documents=len(documents),
        tokens=int(offsets[-1]),
        bytes=sum(each.bytes for each in documents),
        damaged=sum(each.replaced > 0 for each in documents),
        replaced=sum(each.replaced for each in documents),
        sha256=sha256(data),
        offsets_sha256=sha256(places),
    )


class ShardedTokens:
    """A finished folder of shards, opened for reading.

    Opening checks the sizes of all files, ``check`` their contents.

    Args:
        folder: a folder written by ``kla data``.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.index = Index.read(self.folder)
        for shard in self.index.shards:
            check_sizes(self.folder, shard, self.index.dtype)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the folder, which must be the one that made the shards."""
        found = Tokenizer.load(self.folder)
        self.check_tokenizer(found)
        return found

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise an error if a tokenizer is not the one that made the shards."""
        if tokenizer.fingerprint != self.index.tokenizer:
            raise ValueError(
                f"the tokenizer is not the one that made the shards in {self.folder}: its "
                f"fingerprint is {tokenizer.fingerprint[:12]}, theirs {self.index.tokenizer[:12]}. "
                "The ids would mean other text. Use the tokenizer in that folder, or build the "
                "shards again."
            )

    def shards(self, split: str) -> list[Shard]:
        """The shards of a split."""
        found = [shard for shard in self.index.shards if shard.split == split]
        if not found:
            raise ValueError(f"{self.folder} has no documents for {split}.")
        return found

    def tokens(self, shard: Shard) -> Tokens:
        """Token ids of a shard, mapped into memory."""
        return np.memmap(self.folder / f"{shard.name}.bin", self.index.dtype, "r")

    def offsets(self, shard: Shard) -> Tokens:
        """Start of every document of a shard, then the end, ``[documents + 1]``."""
        return np.fromfile(self.folder / f"{shard.name}.offsets", OFFSET_DTYPE).astype(np.int64)

    def check(self) -> None:
        """Compare all files with the index; raises an error at the first difference."""
        self.tokenizer()
        for shard in self.index.shards:
            check_contents(self.folder, shard)
            offsets, tokens = self.offsets(shard), self.tokens(shard)
            starts = np.flatnonzero(tokens == self.index.bos)
            if offsets[-1] != shard.tokens or not np.array_equal(starts, offsets[:-1]):
                raise ValueError(
                    f"the documents of {shard.name} in {self.folder} do not match its offsets."
                )
            if int(tokens.max(initial=0)) >= self.index.vocab_size:
                raise ValueError(f"{shard.name} in {self.folder} has ids outside the vocabulary.")


def check_sizes(folder: Path, shard: Shard, dtype: str) -> None:
    """Raise an error if files of a shard are missing or have the wrong size; reads nothing."""
    wanted = {
        f"{shard.name}.bin": shard.tokens * np.dtype(dtype).itemsize,
        f"{shard.name}.offsets": (shard.documents + 1) * np.dtype(OFFSET_DTYPE).itemsize,
    }
    for name, size in wanted.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found:,} bytes long instead of {size:,}"
            raise ValueError(
                f"{path} is {state}. Restore it, or delete {folder / INDEX} and run the same `kla "
                "data` command again: it keeps intact shards and rebuilds the others."
            )


def check_contents(folder: Path, shard: Shard) -> None:
    """Raise an error if the contents of a shard have changed."""
    for name, wanted in (("bin", shard.sha256), ("offsets", shard.offsets_sha256)):
        path = folder / f"{shard.name}.{name}"
        if sha256(path) != wanted:
            raise ValueError(
                f"{path} has changed since it was written: its checksum differs. Restore it, or "
                f"delete {folder / INDEX} and run the same `kla data` command again."
            )
