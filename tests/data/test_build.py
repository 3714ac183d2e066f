"""Shards: always the same, whatever stops the run, and every damage is noticed."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from kalman_attention.data import build as building
from kalman_attention.data import encoding
from kalman_attention.data.build import BuildOptions, build
from kalman_attention.data.shards import ShardedTokens, token_dtype
from kalman_attention.data.sources import Corpus
from kalman_attention.data.tokenizer import train_tokenizer
from tests.data.small import contents, corpus, options, shards, text


def decoded(data, split):
    """The texts of a split, from its shards."""
    tokenizer = data.tokenizer()
    found = []
    for shard in data.shards(split):
        tokens, offsets = data.tokens(shard), data.offsets(shard)
        for begin, end in pairwise(offsets):
            assert tokens[begin] == tokenizer.bos
            found.append(tokenizer.decode(tokens[begin + 1 : end].tolist()))
    return found


def test_last_shard_is_for_validation(tmp_path):
    data = ShardedTokens(shards(tmp_path))
    data.check()
    _, texts = corpus(tmp_path)
    assert decoded(data, "train") + decoded(data, "validation") == texts
    assert len(data.shards("train")) > 2
    assert len(data.shards("validation")) == 1
    *whole, rest, last = (shard.tokens for shard in data.index.shards)
    assert all(200 <= size < 400 for size in whole)
    assert rest + last >= 100
    assert last <= 0.05 * data.index.total("tokens")
    assert data.index.total("bytes") == sum(len(each.encode()) for each in texts)
    assert data.index.total("documents", "train") == len(decoded(data, "train"))


def test_every_nth_document_for_validation(tmp_path):
    data = ShardedTokens(shards(tmp_path, validation=7))
    data.check()
    _, texts = corpus(tmp_path)
    assert decoded(data, "validation") == texts[6::7]
    assert decoded(data, "train") == [each for i, each in enumerate(texts) if i % 7 != 6]


def test_of_a_large_corpus_validation_is_a_shard(tmp_path):
    data = ShardedTokens(shards(tmp_path, documents=400, shard_tokens=100))
    *whole, last = (shard.tokens for shard in data.index.shards)
    assert len(whole) > 30
    assert all(size >= 100 for size in whole)
    assert 50 <= last < 0.05 * data.index.total("tokens")


def test_a_small_corpus_gives_its_last_twentieth(tmp_path):
    data = ShardedTokens(shards(tmp_path, shard_tokens=1 << 25))
    assert [shard.name for shard in data.index.shards] == ["train_00000", "validation_00000"]
    share = data.index.total("tokens", "validation") / data.index.total("tokens")
    assert 0.02 < share < 0.08


def lines(count):
    return "".join(f"{text(i, 6)}\n" for i in range(count))


@pytest.mark.parametrize(
    ("contents_of_files", "begins_a_line"),
    [
        ([lines(200)], True),
        ([lines(20), lines(180)], True),
        ([lines(180), lines(20)], True),
        ([lines(30)] * 10, True),
        ([text(1, 2000)], False),  # no line ends: between words
        (["\u4f60\u597d" * 900], False),  # nor spaces: between characters
    ],
    ids=["one", "two", "a small last", "ten", "a line", "no words"],
)
def test_few_documents_give_their_last_twentieth(tmp_path, contents_of_files, begins_a_line):
    for i, content in enumerate(contents_of_files):
        (tmp_path / f"{i}.txt").write_text(content, encoding="utf-8")
    found = Corpus(inputs=tuple(str(p) for p in sorted(tmp_path.glob("*.txt"))))
    out = tmp_path / "out"
    chosen = BuildOptions(corpus=found, vocab_size=265)
    build(out, chosen, workers=1, quiet=True)
    data = ShardedTokens(out)
    data.check()
    train, validation = decoded(data, "train"), decoded(data, "validation")
    assert train[: len(contents_of_files) - 1] == contents_of_files[:-1]
    assert "".join(train + validation) == "".join(contents_of_files)
    assert not begins_a_line or train[-1].endswith("\n")
    assert data.index.total("bytes") == sum(len(each.encode()) for each in contents_of_files)
    assert data.index.total("bytes", "validation") == len(validation[-1].encode())
    share = data.index.total("tokens", "validation") / data.index.total("tokens")
    assert 0.02 < share <= 0.05


def test_stopped_while_a_document_is_divided_it_goes_on(tmp_path, monkeypatch):
    (tmp_path / "book.txt").write_text(lines(100))
    chosen = BuildOptions(corpus=Corpus(inputs=(str(tmp_path / "book.txt"),)), vocab_size=300)
    build(tmp_path / "clean", chosen, workers=1, quiet=True)
    want, real = contents(tmp_path / "clean"), os.replace

    def replace(a, b):
        if str(b).endswith("validation_00000.bin"):
            raise Stop
        real(a, b)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(Stop):
        build(tmp_path / "stopped", chosen, workers=1, quiet=True)
    assert (tmp_path / "stopped" / "train_00000.json").exists()
    monkeypatch.setattr(os, "replace", real)
    build(tmp_path / "stopped", chosen, workers=1, quiet=True)
    assert contents(tmp_path / "stopped") == want


@pytest.mark.parametrize(
    ("size", "entries"),
    [(1, 265), (1 << 18, 512), (1_800_000, 2048), ((1 << 24) - 1, 16_384), (1 << 24, 32_768)],
)
def test_the_default_vocabulary_follows_the_size(size, entries):
    assert building.default_vocabulary(size) == entries
    assert building.default_vocabulary(0) == building.default_vocabulary(1 << 40) == 32_768


def test_a_build_that_failed_leaves_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with pytest.raises(ValueError, match=r"too short to learn 9,000 tokens.* at most \d"):
            build(tmp_path / name, options(tmp_path, vocab_size=9000), workers=1, quiet=True)
    assert not (tmp_path / "new").exists()
    assert not list((tmp_path / "empty").iterdir())


def test_what_came_to_no_shard_does_not_bind_the_next(tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    out = tmp_path / "shards"
    with monkeypatch.context() as patched:
        patched.setattr(building, "_write_all", stop)
        with pytest.raises(KeyboardInterrupt):
            build(out, options(tmp_path, vocab_size=270), workers=1, quiet=True)
    assert {path.name for path in out.iterdir()} >= {"build.json", "tokenizer.json"}
    build(out, options(tmp_path), workers=1, quiet=True)
    build(tmp_path / "clean", options(tmp_path), workers=1, quiet=True)
    assert contents(out) == contents(tmp_path / "clean")


def test_the_tokenizer_of_something_else_is_left_alone(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    train_tokenizer([text(1, 300)], 290).save(model)
    before = contents(model)
    with pytest.raises(ValueError, match=r"`kla data` did not write.*--tokenizer"):
        build(model, options(tmp_path), workers=1, quiet=True)
    assert contents(model) == before


def test_the_same_bytes_for_any_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_DOCUMENTS", 7)
    one, two = tmp_path / "one", tmp_path / "two"
    build(one, options(tmp_path), workers=1, quiet=True)
    build(two, options(tmp_path), workers=2, quiet=True)
    assert contents(one) == contents(two)


class Stop(Exception):
    pass


@pytest.mark.parametrize("validation", [0, 7])
def test_stopped_at_any_write_it_goes_on(tmp_path, monkeypatch, validation):
    chosen = options(tmp_path, validation=validation, documents=24)
    clean = tmp_path / "clean"
    build(clean, chosen, workers=1, quiet=True)
    want = contents(clean)
    real = os.replace
    for stop in range(len(want)):
        out, calls = tmp_path / f"stopped_{stop}", iter(range(1000))

        def replace(a, b, stop=stop, calls=calls):
            if next(calls) == stop:
                raise Stop
            real(a, b)

        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(Stop):
            build(out, chosen, workers=1, quiet=True)
        monkeypatch.setattr(os, "replace", real)
        assert not list(out.glob(".*"))
        kept = {p.name: p.stat().st_mtime_ns for p in out.iterdir() if p.suffix == ".bin"}
        build(out, chosen, workers=1, quiet=True)
        assert contents(out) == want
        finished = sorted(name for name in kept if name.startswith("train"))[:-1]
        assert all((out / name).stat().st_mtime_ns == kept[name] for name in finished)


def test_killed_it_goes_on(tmp_path):
    chosen = options(tmp_path, documents=500)
    program = (
        "import sys, time, pathlib\n"
        "from kalman_attention.data import build as b\n"
        "from tests.data.small import options\n"
        "real = b.write_shard\n"
        "def slow(*args):\n"
        "    time.sleep(0.05)\n"
        "    return real(*args)\n"
        "b.write_shard = slow\n"
        "b.build(sys.argv[2], options(pathlib.Path(sys.argv[1]), documents=500), workers=1)\n"
    )
    out = tmp_path / "killed"
    run = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(out)])
    deadline = time.monotonic() + 60
    while not (out / "train_00003.json").exists():
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert not (out / "index.json").exists()
    with pytest.raises(ValueError, match="has not finished it"):
        ShardedTokens(out)
    build(out, chosen, workers=1, quiet=True)
    build(tmp_path / "clean", chosen, workers=1, quiet=True)
    assert contents(out) == contents(tmp_path / "clean")


def test_a_full_disk(tmp_path, monkeypatch):
    clean = contents(shards(tmp_path))
    out, real, calls = tmp_path / "full", os.fsync, iter(range(1000))

    def fsync(handle):
        if next(calls) == 16:  # of a file and of its folder in turn
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(
        OSError, match=r"the disk is full: .* free some space and run the same command"
    ):
        build(out, options(tmp_path), workers=1, quiet=True)
    monkeypatch.setattr(os, "fsync", real)
    left = contents(out)
    assert len(left) == 8
    assert all(clean[name] == data for name, data in left.items())
    build(out, options(tmp_path), workers=1, quiet=True)
    assert contents(out) == clean


def test_a_second_run_does_nothing(tmp_path, monkeypatch):
    out = shards(tmp_path)
    monkeypatch.setattr(building, "_write_all", None)
    assert build(out, options(tmp_path), quiet=True) == ShardedTokens(out).index


def test_other_options_are_refused(tmp_path):
    out = shards(tmp_path)
    with pytest.raises(ValueError, match="started with another shard_tokens"):
        build(out, options(tmp_path, shard_tokens=300), quiet=True)
    chosen = options(tmp_path)
    (tmp_path / "corpus.txt").write_text("something else")
    with pytest.raises(ValueError, match="started with another sources"):
        build(out, chosen, quiet=True)


def damage_end(path):
    path.write_bytes(path.read_bytes()[:-2])


def damage_middle(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("suffix", ["bin", "offsets"])
def test_a_truncated_shard_is_noticed_at_once(tmp_path, suffix):
    out = shards(tmp_path)
    damage_end(out / f"train_00001.{suffix}")
    with pytest.raises(ValueError, match=rf"train_00001.{suffix} is .* bytes long instead of"):
        ShardedTokens(out)
    (out / f"train_00001.{suffix}").unlink()
    with pytest.raises(ValueError, match=rf"train_00001.{suffix} is missing"):
        ShardedTokens(out)


@pytest.mark.parametrize("suffix", ["bin", "offsets"])
def test_a_changed_shard_is_noticed_by_check_and_repaired(tmp_path, suffix):
    out = shards(tmp_path)
    want = contents(out)
    damage_middle(out / f"train_00001.{suffix}")
    with pytest.raises(ValueError, match=rf"train_00001.{suffix} has changed since"):
        ShardedTokens(out).check()
    (out / "index.json").unlink()  # as the message says
    build(out, options(tmp_path), workers=1, quiet=True)
    assert contents(out) == want


def test_the_wrong_tokenizer_is_noticed(tmp_path):
    out = shards(tmp_path)
    other = train_tokenizer([text(99, 200)], 280)
    with pytest.raises(ValueError, match="not the one that made the shards"):
        ShardedTokens(out).check_tokenizer(other)
    other.save(out)
    with pytest.raises(ValueError, match="not the one that made the shards"):
        ShardedTokens(out).check()
    with pytest.raises(ValueError, match="not the tokenizer that made the shards"):
        build(out, options(tmp_path), quiet=True)
    (out / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="no tokenizer in"):
        ShardedTokens(out).check()


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"format": 1}', b'{"format": 99}'])
def test_a_damaged_index(tmp_path, content):
    out = shards(tmp_path)
    (out / "index.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged|another version"):
        ShardedTokens(out)


@pytest.mark.parametrize("name", ["../elsewhere", "/elsewhere", "a/b", "a\\b", "..", "", "a\n"])
def test_a_shard_outside_its_folder_is_refused(tmp_path, name):
    out = shards(tmp_path)
    index = json.loads((out / "index.json").read_text())
    index["shards"][0]["name"] = name
    (out / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="must name files next to the index"):
        ShardedTokens(out)


def test_a_tokenizer_that_is_brought(tmp_path):
    mine = train_tokenizer([text(5, 300)], 290)
    (tmp_path / "mine").mkdir()
    mine.save(tmp_path / "mine")
    data = ShardedTokens(shards(tmp_path, tokenizer=str(tmp_path / "mine")))
    assert data.index.tokenizer == mine.fingerprint
    _, texts = corpus(tmp_path)
    assert decoded(data, "train") + decoded(data, "validation") == texts


def test_corpora_that_are_too_small(tmp_path):
    tokenizer = train_tokenizer([text(5, 300)], 290)
    (tmp_path / "t").mkdir()
    tokenizer.save(tmp_path / "t")

    def attempt(name, content, **changes):
        path = tmp_path / f"{name}.txt"
        path.write_text(content)
        found = Corpus(inputs=(str(path),), separator="|")
        chosen = BuildOptions(corpus=found, tokenizer=str(tmp_path / "t"), **changes)
        build(tmp_path / name, chosen, workers=1, quiet=True)

    with pytest.raises(ValueError, match=r"nothing\.txt is empty: there is no text"):
        attempt("nothing", "")
    with pytest.raises(ValueError, match="empty: none of its documents"):
        attempt("borders", "|||")
    with pytest.raises(ValueError, match="no document is left for validation"):
        attempt("one", "o")
    with pytest.raises(ValueError, match="no document is left for validation"):
        attempt("few", "one|two|three", validation=4)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="no readable file"):
        build(tmp_path / "x", BuildOptions(corpus=Corpus(inputs=(str(tmp_path / "folder"),))))
    assert not (tmp_path / "x").exists()
    assert not list(tmp_path.rglob("*.bin"))


def test_refused_options():
    with pytest.raises(ValueError, match="every n-th"):
        BuildOptions(corpus=Corpus(), validation=1)
    with pytest.raises(ValueError, match="shard_tokens must be at least 1"):
        BuildOptions(corpus=Corpus(), shard_tokens=0)


def test_damaged_text_is_counted(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"|".join([b"fine text", b"b\xffd", b"\xfe\xff", b"ok"] * 20))
    chosen = BuildOptions(
        corpus=Corpus(inputs=(str(path),), separator="|", replace_invalid=True),
        vocab_size=265,
        shard_tokens=40,
    )
    index = build(tmp_path / "out", chosen, workers=1, quiet=True)
    assert index.total("damaged") == 40
    assert index.total("replaced") == 60


def test_ids_are_as_small_as_they_can_be():
    assert np.dtype(token_dtype(65_536)).itemsize == 2
    assert np.dtype(token_dtype(65_537)).itemsize == 4
