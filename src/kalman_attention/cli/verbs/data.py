"""``kla data``: turn text into shards of tokens for training, or check such shards."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kalman_attention._tables import render
from kalman_attention.cli import numbers
from kalman_attention.cli.arguments import add_number, add_out_folder
from kalman_attention.cli.paths import DATA

if TYPE_CHECKING:
    from kalman_attention.data.shards import Index

NANO_VOCABULARY = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT",
        help="text, JSONL or Parquet files (also .gz), folders of them, hub:NAME[:CONFIG[:SPLIT]], "
        "or fineweb-edu; without any, Python's standard library. `check DIR` verifies finished "
        "shards",
    )
    add_out_folder(parser, "folder for the shards", default=str(DATA))
    parser.add_argument("--field", default="text", help="JSON field or column with the text")
    parser.add_argument(
        "--separator",
        help="string between documents in plain text (default: a file is one document)",
    )
    add_number(
        parser,
        "--document-bytes",
        numbers.nonnegative_int,
        "split longer plain-text files at the end of a line; 0 never splits",
        default=100_000,
    )
    parser.add_argument(
        "--tokenizer", help="folder, tokenizer.json or hub name (default: train a new one)"
    )
    parser.add_argument(
        "--bos", metavar="TOKEN", help="start-of-text token (default: that of the tokenizer)"
    )
    add_number(
        parser,
        "--vocab-size",
        numbers.positive_int,
        "vocabulary size of a trained tokenizer (default: the largest power of two that leaves 512 "
        f"bytes of text for each, at most 32768; {NANO_VOCABULARY} for the standard library)",
    )
    parser.add_argument(
        "--replace-invalid",
        action="store_true",
        help="also read files that are mostly not UTF-8; invalid bytes become U+FFFD",
    )
    add_number(
        parser,
        "--tokenizer-characters",
        numbers.positive_int,
        "maximum number of characters to train a tokenizer on",
        default=2_000_000_000,
    )
    add_number(
        parser,
        "--shard-tokens",
        numbers.positive_int,
        "approximate number of tokens per shard",
        default=1 << 23,  # small enough that a build that is stopped can resume without much loss
    )
    add_number(
        parser,
        "--validation",
        numbers.nonnegative_int,
        "hold out every N-th document; 0 holds out the last shard",
        default=0,
    )
    add_number(parser, "--workers", numbers.workers, "processes (default: one per core)")


def run(args: argparse.Namespace) -> int:
    """Build or check shards, and print what the folder contains."""
    from kalman_attention.data import build, shards, sources

    if args.inputs[:1] == ["check"]:
        if len(args.inputs) != 2:
            raise ValueError("`kla data check` takes one folder.")
        found = shards.ShardedTokens(args.inputs[1])
        found.check()
        _report(found.folder, found.index)
        print("all checksums, documents and token ids are valid")
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
            f"{damaged:,} documents were not valid UTF-8: {index.total('replaced'):,} invalid "
            "sequences became U+FFFD"
        )
