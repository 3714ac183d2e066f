"""Sources of documents: text, JSONL, Parquet, a hub data set, or the standard library.

Every source has a fixed order of documents, and can start after any number of them.
"""

import codecs
import gzip
import hashlib
import itertools
import json
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

HUB = "hub:"
FINEWEB_EDU = "hub:HuggingFaceFW/fineweb-edu:sample-100BT"
SEED = 42

_BLOCK = 1 << 20  # bytes per read
# A file is rejected if more than 1 % of its first 64 KiB are invalid: stray bytes are replaced, but
# text in Latin-1 or a picture has more than that.
_SAMPLE, _MOST_INVALID = 1 << 16, 0.01
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
# Half of a surrogate pair: JSON can contain one, and invalid bytes in JSON are read as one.
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_TEXT = (".txt", ".md", ".rst", ".py", ".text", ".tokens", ".raw")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What to read and how; together with the files it determines every document.

    Attributes:
        inputs: files, folders, ``hub:NAME[:CONFIG[:SPLIT]]``; empty for the source files of the
            standard library.
        text_field: field or column of JSONL, Parquet and hub data sets that contains the text.
        separator: separator of documents in plain text; None makes each file one document.
        document_bytes: without a separator, split longer files at the next end of line; 0 for
            never.
        replace_invalid: also read files with much invalid UTF-8, replacing it by U+FFFD.
    """

    inputs: tuple[str, ...] = ()
    text_field: str = "text"
    separator: str | None = None
    document_bytes: int = 100_000
    replace_invalid: bool = False

    @property
    def is_hub(self) -> bool:
        """Whether the documents are read over the network."""
        return any(each.startswith(HUB) for each in self.inputs)

    def files(self) -> list[Path]:
        """The files, in the order in which they are read."""
        if not self.inputs:
            return standard_library()
        found: list[Path] = []
        for each in self.inputs:
            path = Path(each)
            if path.is_dir():
                inside = sorted(p for p in path.rglob("*") if p.is_file() and _readable(p))
                found += inside
            elif path.is_file():
                found.append(path)
            else:
                raise ValueError(
                    f"there is no file or folder {each}. A hub data set is written "
                    f"{HUB}NAME:CONFIG, such as {FINEWEB_EDU}."
                )
        return found

    def check(self) -> None:
        """Raise an error if there is no text, or if files are not text."""
        if self.is_hub:
            return
        files = self.files()
        if not files:
            raise ValueError(
                "the corpus is empty: no readable file was found in "
                f"{', '.join(self.inputs)}. In folders only {', '.join((*_TEXT, *_KINDS))} are "
                "read, also with .gz; name other files individually."
            )
        if not any(path.stat().st_size for path in files):
            raise ValueError(f"{_named(files)} empty: there is no text to read.")
        if not self.replace_invalid:
            for path in files:
                _check_text(path)

    def describe(self) -> list[dict[str, Any]]:
        """Names, sizes and hashes of both ends of the files: a cheap way to tell corpora apart."""
        if self.is_hub:
            return [{"name": each} for each in self.inputs]
        return [{"name": p.name, **_look(p)} for p in self.files()]


class Document(NamedTuple):
    """One document.

    Attributes:
        text: valid Unicode.
        replaced: number of places that were invalid and became U+FFFD.
    """

    text: str
    replaced: int


def documents(corpus: Corpus, skip: int = 0) -> Iterator[Document]:
    """The documents of a corpus in order, including empty ones, so that counts are exact.

    Args:
        corpus: the corpus.
        skip: number of documents to skip at the beginning.
    """
    if corpus.is_hub:
        texts: Iterable[str | bytes] = _hub_texts(corpus, skip)
    else:
        every = (_file_texts(path, corpus) for path in corpus.files())
        texts = itertools.islice(itertools.chain.from_iterable(every), skip, None)
    return map(_clean, texts)


def _clean(text: str | bytes) -> Document:
    if isinstance(text, str):
        return Document(*_HALF_PAIR.subn("\ufffd", text))
    try:
        return Document(text.decode("utf-8"), 0)
    except UnicodeDecodeError:
        clean = text.decode("utf-8", "replace")
        return Document(clean, clean.count("\ufffd") - text.count("\ufffd".encode()))


def standard_library() -> list[Path]:
    """Source files of Python's standard library, shuffled so that every part is similar."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "__pycache__", "lib2to3", "test", "tests"}
    names = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not skip & set(path.relative_to(root).parts)
    ]
    names.sort()
    random.Random(SEED).shuffle(names)
    return [root / name for name in names]


def _look(path: Path) -> dict[str, Any]:
    size, end = path.stat().st_size, 1 << 16
    with path.open("rb") as file:
        found = hashlib.sha256(file.read(end))
        file.seek(max(0, size - end))
        found.update(file.read(end))
    return {"bytes": size, "ends": found.hexdigest()[:16]}


def _check_text(path: Path) -> None:
    """Raise an error if the beginning of a file is binary, or in another encoding."""
    if _kind(path) == "parquet":
        return
    with _open(path) as file:
        sample = file.read(_SAMPLE)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    # A character that the end of the sample splits is not invalid.
    text = decoder.decode(sample, final=len(sample) < _SAMPLE)
    # Zero bytes do not occur in text either; UTF-16 is full of them.
    invalid = text.count("\ufffd") - sample.count("\ufffd".encode()) + sample.count(0)
    if invalid > _MOST_INVALID * len(sample):
        raise ValueError(
            f"{path} is not UTF-8 text: {invalid:,} of its first {len(sample):,} bytes are "
            "invalid. If it is text in another encoding, convert it (iconv -t UTF-8); if it is "
            "not text, leave it out. --replace-invalid reads it anyway, with U+FFFD for invalid "
            "bytes."
        )


def _named(files: Sequence[Path]) -> str:
    """The first few files, as the subject of a sentence."""
    shown = ", ".join(str(path) for path in files[:3])
    more = f" and {len(files) - 3:,} more files" if len(files) > 3 else ""
    return f"{shown}{more} {'is' if len(files) == 1 else 'are'}"


def _readable(path: Path) -> bool:
    name = path.name.removesuffix(".gz")
    return not name.startswith(".") and Path(name).suffix in (*_TEXT, *_KINDS)


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(path)) if path.suffix == ".gz" else path.open("rb")


def _kind(path: Path) -> str:
    return _KINDS.get(Path(path.name.removesuffix(".gz")).suffix, "text")


def _file_texts(path: Path, corpus: Corpus) -> Iterator[str | bytes]:
    kind = _kind(path)
    if kind == "parquet":
        return _parquet_texts(path, corpus.text_field)
    if kind == "jsonl":
        return _jsonl_texts(path, corpus.text_field)
    return _plain_texts(path, corpus)


def _jsonl_texts(path: Path, name: str) -> Iterator[str]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"line {number} of {path}"
            try:
                record = json.loads(line.decode("utf-8", "surrogateescape"))
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}.") from error
            yield _field(record, name, where)


def _field(record: Any, name: str, where: str) -> str:
    text = record.get(name) if isinstance(record, dict) else None
    if isinstance(text, str):
        return text
    known = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
    raise ValueError(f"{where} has no text in {name!r}; it has {known}. Choose with --field.")


def _parquet_texts(path: Path, name: str) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise ValueError(
            "reading Parquet needs pyarrow: pip install 'kalman_attention[data]'"
        ) from error
    with parquet.ParquetFile(path) as file:
        if name not in file.schema_arrow.names:
            known = ", ".join(file.schema_arrow.names)
            raise ValueError(f"{path} has no column {name!r}; it has {known}. Choose with --field.")
        for batch in file.iter_batches(1024, columns=[name]):
            yield from (text or "" for text in batch.column(0).to_pylist())


def _plain_texts(path: Path, corpus: Corpus) -> Iterator[bytes]:
    with _open(path) as file:
        blocks = iter(lambda: file.read(_BLOCK), b"")
        first = next(blocks, b"").removeprefix(b"\xef\xbb\xbf")  # byte-order mark
        blocks = itertools.chain([first], blocks)
        if corpus.separator is not None:
            yield from _separate(blocks, corpus.separator.encode())
        else:
            yield from _cut(blocks, corpus.document_bytes)


def _separate(blocks: Iterable[bytes], separator: bytes) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        *whole, rest = (rest + block).split(separator)
        yield from (piece.strip() for piece in whole)
    yield rest.strip()


def _cut(blocks: Iterable[bytes], most: int) -> Iterator[bytes]:
    rest = b""
    for block in blocks:
        rest += block
        while most and len(rest) > 2 * most:
            end = rest.find(b"\n", most, 2 * most) + 1 or _character_boundary(rest, most)
            yield rest[:end]
            rest = rest[end:]
    if most and len(rest) > most:
        end = rest.find(b"\n", most) + 1 or len(rest)
        yield rest[:end]
        rest = rest[end:]
    yield rest


def _character_boundary(data: bytes, place: int) -> int:
    """The last position up to ``place`` that is not inside a character."""
    for back in range(4):
        if data[place - back] & 0xC0 != 0x80:
            return place - back
    return place


def _hub_texts(corpus: Corpus, skip: int) -> Iterator[str]:
    """Documents of a hub data set, streamed and shuffled with a fixed random seed."""
    if len(corpus.inputs) != 1:
        raise ValueError("a hub data set must be the only input.")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(
            "reading from the hub needs datasets: pip install 'kalman_attention[data]'"
        ) from error
    name, config, split = hub_parts(corpus.inputs[0])
    found = datasets.load_dataset(name, config, split=split, streaming=True)
    found = found.shuffle(seed=SEED, buffer_size=10_000).skip(skip)
    for record in found:
        yield _field(record, corpus.text_field, f"a document of {corpus.inputs[0]}")


def hub_parts(text: str) -> tuple[str, str | None, str]:
    """Name, configuration and split of ``hub:NAME[:CONFIG[:SPLIT]]``."""
    parts: Sequence[str] = text.removeprefix(HUB).split(":")
    if not parts[0] or len(parts) > 3:
        raise ValueError(f"a hub data set is written {HUB}NAME[:CONFIG[:SPLIT]], not {text!r}.")
    config = parts[1] if len(parts) > 1 and parts[1] else None
    return parts[0], config, parts[2] if len(parts) > 2 else "train"
