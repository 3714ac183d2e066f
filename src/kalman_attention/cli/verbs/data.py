"""``kla data``: turn text into shards of tokens for training, or check such shards."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kalman_attention._tables import render
from kalman_attention.cli import numbers
from kalman_attention.cli.paths import DATA, out_folder

if TYPE_CHECKING:
    from kalman_attention.data.shards import Index

NANO_VOCABULARY = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="text, JSONL or Parquet files (also .gz), folders of them, hub:NAME[:CONFIG[:SPLIT]], "
        "or fineweb-edu; nothing: Python's standard library. `check DIR` verifies finished shards",
    )
    parser.add_argument(
        "--out", type=out_folder, default=str(DATA), metavar="DIR", help="folder to write"
    )
    parser.add_argument("--field", default="text", help="JSON field or column with the text")
    parser.add_argument(
        "--separator",
        help="what separates documents in plain text (default: a file is one document)",
    )
    parser.add_argument(
        "--document-bytes",
        type=numbers.nonnegative_int,
        default=100_000,
        metavar="N",
        help="cut longer plain-text files at a line end; 0 never does",
    )
    parser.add_argument(
        "--tokenizer", help="folder, tokenizer.json or hub name (default: train a new one)"
    )
    parser.add_argument(
        "--bos", metavar="TOKEN", help="start-of-text token (default: what the tokenizer says)"
    )
    parser.add_argument(
        "--vocab-size",
        type=numbers.positive_int,
        metavar="N",
        help="entries of a trained tokenizer (default: the largest power of two that leaves 512 "
        f"bytes of text for each, 32768 at most; {NANO_VOCABULARY} for the standard library)",
    )
    parser.add_argument(
        "--replace-invalid",
        action="store_true",
        help="read also files that are hardly UTF-8; what is not becomes U+FFFD",
    )
    parser.add_argument(
        "--tokenizer-characters",
        type=numbers.positive_int,
        default=2_000_000_000,
        metavar="N",
        help="characters on which a tokenizer is trained, at most",
    )
    parser.add_argument(
        "--shard-tokens",
        type=numbers.positive_int,
        default=1 << 23,
        metavar="N",
        help="tokens of a shard, about",
    )
    parser.add_argument(
        "--validation",
        type=numbers.nonnegative_int,
        default=0,
        metavar="N",
        help="hold out every N-th document; 0 holds out the last shard",
    )
    parser.add_argument(
        "--workers", type=numbers.workers, metavar="N", help="processes (default: one per core)"
    )


def run(args: argparse.Namespace) -> int:
    """Build, or check; print what the folder holds."""
    from kalman_attention.data import build, shards, sources

    if args.inputs[:1] == ["check"]:
        if len(args.inputs) != 2:
            raise ValueError("`kla data check` takes one folder.")
        found = shards.ShardedTokens(args.inputs[1])
        found.check()
        _report(found.folder, found.index)
        print("every checksum, document and id is as it should be")
        return 0
    inputs = (sources.FINEWEB_EDU,) if args.inputs == ["fineweb-edu"] else tuple(args.inputs)
    options = build.BuildOptions(
        corpus=sources.Corpus(
            inputs=inputs,
            text_field=args.field,
            separator=args.separator and args.separator.encode().decode("unicode_escape"),
            document_bytes=args.document_bytes,
            replace_invalid=args.replace_invalid,
        ),
        tokenizer=args.tokenizer,
        bos=args.bos,
        vocab_size=args.vocab_size or (None if inputs else NANO_VOCABULARY),
        tokenizer_characters=args.tokenizer_characters,
        shard_tokens=args.shard_tokens,
        validation=args.validation,
    )
    begin = time.monotonic()
    index = build.build(args.out, options, workers=args.workers)
    _report(args.out, index)
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


def _report(folder: Path, index: "Index") -> None:
    rows = []
    for split in ("train", "validation"):
        count = sum(shard.split == split for shard in index.shards)
        documents, tokens, size = (index.total(w, split) for w in ("documents", "tokens", "bytes"))
        ratio = f"{size / max(tokens - documents, 1):.2f}"
        rows.append([split, f"{count}", f"{documents:,}", f"{tokens:,}", f"{size:,}", ratio])
    rule = f"the {index.split}" if index.split == "last shard" else index.split
    print(f"{folder}: {index.vocab_size:,} tokens in the vocabulary, validation is {rule}")
    print(render(["split", "shards", "documents", "tokens", "bytes", "bytes/token"], rows))
    damaged = index.total("damaged")
    if damaged:
        print(
            f"{damaged:,} documents were not valid UTF-8: {index.total('replaced'):,} places "
            "became U+FFFD"
        )
