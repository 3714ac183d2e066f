"""The script that prepares the text of the language model comparisons (``dev/corpus.py``)."""

import gzip
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "dev" / "corpus.py"


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Documents from 100 novels of three pieces each, 150 pages, and 150 stories given twice."""
    folder = tmp_path_factory.mktemp("corpus")
    with tarfile.open(folder / "novels.tar.gz", "w:gz") as archive:
        for n in range(100):
            text = f"novel {n}.\n" * (150_000 // len(f"novel {n}.\n") - 10)
            info = tarfile.TarInfo(f"corpus/{n}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    pages = "<mediawiki>" + "".join(f"<page>page {n}.</page>" for n in range(150))
    (folder / "enwik8.gz").write_bytes(gzip.compress(pages.encode()))
    stories = [f"Story {n}, the end" for n in range(150)]
    again = [f"story {n}: THE end!" for n in range(150)]
    (folder / "stories.txt").write_text("<|endoftext|>".join([*stories, *again]), encoding="utf-8")
    command = [sys.executable, SCRIPT, "--novels", folder / "novels.tar.gz"]
    command += ["--enwik8", folder / "enwik8.gz", "--stories", folder / "stories.txt"]
    subprocess.run([*map(str, command), "--out", str(folder / "text.jsonl")], check=True)
    found = (folder / "text.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in found]


def work(document: str) -> str:
    """What a document is a piece of, such as ``novel 7``."""
    return " ".join(re.findall(r"\w+", document.lower())[:2])


def test_no_work_is_on_both_sides(lines: list[str]) -> None:
    held_out = {work(text) for text in lines[49::50]}
    train = {work(text) for place, text in enumerate(lines) if place % 50 != 49}
    assert len(lines) % 50 == 0
    assert held_out
    assert not held_out & train
    assert {name.split()[0] for name in train} == {"novel", "page", "story"}


def test_duplicates_are_removed_and_novels_are_cut(lines: list[str]) -> None:
    stories = [work(text) for text in lines if text.lower().startswith("story")]
    assert len(stories) == len(set(stories))
    assert max(map(len, lines)) <= 50_000
    assert sum(text.startswith("novel") for text in lines) > 200  # three pieces each, where kept
