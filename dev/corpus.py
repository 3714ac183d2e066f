r"""The text of the language model comparisons, as one JSONL file for ``kla data``.

Novels, pages of an encyclopedia and short stories, in shuffled documents of at most 50,000
characters. Documents that occur twice are removed. Every 50th line is held out, and a whole work is
either held out or not: no piece of a held-out novel is in the other lines. ::

    python dev/corpus.py --novels 100_english_novels.tar.gz --enwik8 enwik8.gz \
        --stories czhou_test.txt czhou_val.txt tinystories_10k_lines.txt --out runs/text.jsonl
    kla data runs/text.jsonl --vocab-size 4096 --validation 50 --out runs/data
"""

import argparse
import gzip
import json
import random
import re
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

EVERY = 50
LONGEST = 50_000
ENWIK8_BYTES = 90_000_000  # its usual training part
STORY_END = "<|endoftext|>"


def novels(path: Path) -> Iterator[list[str]]:
    """Each novel of an archive, in pieces."""
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda found: found.name):
            file = archive.extractfile(member) if member.name.endswith(".txt") else None
            if file is not None:
                yield pieces(file.read().decode("utf-8-sig", "replace"))


def pages(path: Path) -> Iterator[list[str]]:
    """Each page of enwik8, in pieces."""
    with gzip.open(path) as file:
        text = file.read(ENWIK8_BYTES).decode("utf-8", "ignore")
    for page in text.split("<page>")[1:]:
        yield pieces(page.removesuffix("</page>"))


def stories(paths: Iterable[Path]) -> Iterator[list[str]]:
    """Each story of files that separate them by ``STORY_END``."""
    for path in paths:
        for story in path.read_text(encoding="utf-8", errors="replace").split(STORY_END):
            yield pieces(story)


def pieces(text: str) -> list[str]:
    """A text cut into documents, at line ends where there are any."""
    found, text = [], text.strip()
    while len(text) > LONGEST:
        end = text.rfind("\n", LONGEST // 2, LONGEST) + 1 or LONGEST
        found.append(text[:end].strip())
        text = text[end:]
    return [piece for piece in (*found, text.strip()) if piece]


def unique(works: Iterable[list[str]]) -> Iterator[list[str]]:
    """Works that have not occurred before, apart from case, spaces and punctuation."""
    seen = set()
    for work in works:
        key = re.sub(r"\W+", "", "".join(work)).lower()
        if key and key not in seen:
            seen.add(key)
            yield work


def divide(works: Iterable[list[str]], every: int = EVERY) -> tuple[list[str], list[str]]:
    """Documents for training and documents to hold out: those of every n-th work."""
    train, held_out = [], []
    for place, work in enumerate(works):
        (held_out if place % every == every - 1 else train).extend(work)
    return train, held_out


def interleave(train: list[str], held_out: list[str], every: int = EVERY) -> Iterator[str]:
    """Documents in order, every n-th of them held out, until either kind runs out."""
    for place, document in enumerate(held_out):
        few = train[place * (every - 1) : (place + 1) * (every - 1)]
        if len(few) < every - 1:
            return
        yield from few
        yield document


def main() -> None:
    """Write the corpus and print what it contains."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--novels", type=Path, required=True, help="archive of .txt files")
    parser.add_argument("--enwik8", type=Path, required=True, help="enwik8.gz")
    parser.add_argument("--stories", type=Path, nargs="+", required=True, help="TinyStories files")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    args = parser.parse_args()
    train, held_out = [], []
    random.seed(0)
    for works in (novels(args.novels), pages(args.enwik8), stories(args.stories)):
        several = list(unique(works))
        random.shuffle(several)
        parts = divide(several)
        print(f"{len(several):,} works, {len(parts[0]):,} + {len(parts[1]):,} documents")
        train += parts[0]
        held_out += parts[1]
    random.shuffle(train)
    random.shuffle(held_out)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as file:
        for document in interleave(train, held_out):
            file.write(json.dumps({"text": document}) + "\n")


if __name__ == "__main__":
    main()
