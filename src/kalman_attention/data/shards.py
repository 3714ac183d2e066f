"""Tokens on disk: shards that are mapped into memory, and the index that describes them.

A folder holds, for every shard, ``train_00000.bin`` (token ids, each document begins with the
start-of-text token) and ``train_00000.offsets`` (where documents begin, and the end), little-endian
integers both; ``index.json``, which appears last and says what all of it is; and the tokenizer.
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
        name: of its files, without suffix.
        split: ``"train"`` or ``"validation"``.
        documents: how many.
        tokens: how many, start-of-text tokens included.
        bytes: of the text, as UTF-8.
        damaged: documents that were not valid Unicode.
        replaced: places in them that became U+FFFD.
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
        # An index may come from someone else, and its shards are in its own folder.
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"{self.name!r} is no name of a shard: it must name files beside the index, by "
                "letters, digits, - and _ alone."
            )
        for name in ("documents", "tokens", "bytes", "damaged", "replaced"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a folder of shards holds.

    Attributes:
        tokenizer: fingerprint of the tokenizer that made it.
        vocab_size: of that tokenizer.
        bos: its start-of-text token.
        dtype: of the token ids, as numpy writes it.
        split: how documents were divided, in words.
        sources: names and sizes of what was read.
        shards: in order.
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
        """Sum of a count of ``Shard`` over the shards of a split, or over all."""
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
                f"there is no folder {folder}. `kla data` makes one: without arguments from "
                "Python's standard library, in runs/data; from your own texts with `kla data "
                f"FILES --out {folder}`."
            )
        if not (folder / INDEX).exists():
            raise ValueError(
                f"{folder} holds no {INDEX}: it is no folder of shards, or `kla data` has not "
                "finished it. Run the same `kla data` command again; it goes on where it was."
            )
        data = read_json(folder / INDEX)
        if data.pop("format", None) != FORMAT:
            raise ValueError(f"{folder} was written by another version of the library.")
        for what in ("documents", "tokens", "bytes"):
            data.pop(what, None)  # sums, for people
        return from_dict(cls, data, str(folder / INDEX))


def token_dtype(vocab_size: int) -> str:
    """The smallest type that holds every token id."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class Encoded(NamedTuple):
    """A document as tokens.

    Attributes:
        tokens: its ids, start of text first.
        bytes: size of its text.
        replaced: places in it that were not valid Unicode.
        next: place in the corpus of the document after it; of the document itself, if this is
            only its first part.
        taken: tokens of that first part, without start of text; 0 for a whole document.
    """

    tokens: Tokens
    bytes: int
    replaced: int
    next: int
    taken: int = 0


def write_shard(folder: Path, name: str, dtype: str, documents: Sequence[Encoded]) -> Shard:
    """Write the files of one shard and return its entry; the name begins with the split."""
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
        folder: what ``kla data`` wrote.
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
        """Refuse a tokenizer that is not the one that made the shards."""
        if tokenizer.fingerprint != self.index.tokenizer:
            raise ValueError(
                f"the tokenizer is not the one that made the shards in {self.folder}: its "
                f"fingerprint is {tokenizer.fingerprint[:12]}, theirs {self.index.tokenizer[:12]}. "
                "The ids would mean other text. Use the tokenizer in that folder, or build again."
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
        """Where the documents of a shard begin, and the end, ``[documents + 1]``."""
        return np.fromfile(self.folder / f"{shard.name}.offsets", OFFSET_DTYPE).astype(np.int64)

    def check(self) -> None:
        """Read everything and compare it with the index; raises at the first difference."""
        self.tokenizer()
        for shard in self.index.shards:
            check_contents(self.folder, shard)
            offsets, tokens = self.offsets(shard), self.tokens(shard)
            starts = np.flatnonzero(tokens == self.index.bos)
            if offsets[-1] != shard.tokens or not np.array_equal(starts, offsets[:-1]):
                raise ValueError(
                    f"{shard.name} in {self.folder} has documents where its offsets have none."
                )
            if int(tokens.max(initial=0)) >= self.index.vocab_size:
                raise ValueError(f"{shard.name} in {self.folder} holds ids beyond the vocabulary.")


def check_sizes(folder: Path, shard: Shard, dtype: str) -> None:
    """Refuse a shard whose files are missing or too short; reads nothing."""
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
                "data` command again: it keeps the shards that are whole and redoes the others."
            )


def check_contents(folder: Path, shard: Shard) -> None:
    """Refuse a shard whose contents are not those that were written."""
    for name, wanted in (("bin", shard.sha256), ("offsets", shard.offsets_sha256)):
        path = folder / f"{shard.name}.{name}"
        if sha256(path) != wanted:
            raise ValueError(
                f"{path} has changed since it was written: its checksum is another one. Restore "
                f"it, or delete {folder / INDEX} and run the same `kla data` command again."
            )
