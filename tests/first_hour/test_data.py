"""``kla data`` on what people try first: a book, an empty file, a picture, no shared memory."""

import os
import random
import subprocess

import pytest

from tests.data.small import text
from tests.processes import KLA, assert_refused, kla

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.slow


@pytest.fixture
def book(tmp_path):
    """1.8 MB in lines of a dozen made-up words."""
    draw = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(20_000)]
    weights = [1.0 / rank for rank in range(1, len(words) + 1)]
    path, size = tmp_path / "book.txt", 0
    with path.open("w") as file:
        while size < 1_800_000:
            size += file.write(" ".join(draw.choices(words, weights, k=12)) + ".\n")
    return path


def test_a_book(tmp_path, book):
    done = kla("data", "book.txt", "--out", "a", "--vocab-size", "32768", cwd=tmp_path)
    assert_refused(done, "too short to learn 32,768 tokens", "Ask for at most", "--vocab-size")
    done = kla("data", "book.txt", "--out", "a", cwd=tmp_path)  # in the folder of the failure
    assert done.returncode == 0, done.stderr
    assert "a: 2,048 tokens in the vocabulary" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    tokens = {
        row[0]: int(row[3].replace(",", "")) for row in rows if len(row) == 6 and row[1] == "1"
    }
    assert 0.04 < tokens["validation"] / sum(tokens.values()) <= 0.05
    done = kla("data", "book.txt", "--out", "a", "--vocab-size", "512", cwd=tmp_path)
    assert_refused(done, "started with another vocab_size")


def test_what_is_no_text(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    assert_refused(kla("data", "empty.txt", cwd=tmp_path), "empty.txt is empty")
    (tmp_path / "picture.txt").write_bytes(random.Random(0).randbytes(100_000))
    done = kla("data", "picture.txt", cwd=tmp_path)
    assert_refused(done, "picture.txt is not UTF-8 text", "--replace-invalid")
    assert not (tmp_path / "runs").exists()  # nothing is left behind
    done = kla("data", "picture.txt", "--replace-invalid", "--vocab-size", "265", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "documents were not valid UTF-8" in done.stdout


def lay_out(tmp_path):
    (tmp_path / "b.jsonl").write_text("".join(f'{{"text": "{text(i, 9)}"}}\n' for i in range(50)))
    return ("data", "b.jsonl", "--out", "out", "--vocab-size", "265", "--workers", "2")


def test_workers_need_no_semaphores(tmp_path):
    # As where /dev/shm is missing or must not be written to: making a lock is an error.
    (tmp_path / "sitecustomize.py").write_text(
        "import _multiprocessing\n"
        "class Refuse(_multiprocessing.SemLock):\n"
        "    def __new__(cls, *args, **options): raise PermissionError(13, 'no shared memory')\n"
        "_multiprocessing.SemLock = Refuse\n"
    )
    command = lay_out(tmp_path)
    done = kla(*command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    check = ("-c", "import multiprocessing; multiprocessing.Lock()")
    refused = subprocess.run(
        [KLA[0], *check], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True
    )
    assert b"no shared memory" in refused.stderr  # the obstacle was there


def test_workers_need_no_shared_memory(tmp_path):
    # In a view of the file system of its own, where /dev/shm is read-only.
    mounted = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o ro none /dev/shm && exec "$@"', "sh"]
    try:
        subprocess.run([*mounted, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to mount: {error}")
    done = subprocess.run(
        [*mounted, *KLA, *lay_out(tmp_path)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
