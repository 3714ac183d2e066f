"""``kla data``: what a user types, what comes back."""

import pytest

pytest.importorskip("tokenizers")

from kalman_attention.cli.main import main
from kalman_attention.cli.verbs import data as verb
from kalman_attention.data import sources
from kalman_attention.data.shards import ShardedTokens
from tests.data.small import corpus

SMALL = ["--vocab-size", "300", "--shard-tokens", "200", "--workers", "1"]


def test_build_check_and_damage(tmp_path, capsys):
    corpus(tmp_path)
    out = tmp_path / "shards"
    text = [str(tmp_path / "corpus.txt"), "--separator", "\\n\\n"]
    assert main(["data", *text, "--out", str(out), *SMALL]) == 0
    said = capsys.readouterr().out
    assert "300 tokens in the vocabulary, validation is the last shard" in said
    assert ShardedTokens(out).index.total("documents") == 60
    assert main(["data", "check", str(out)]) == 0
    assert "all checksums, documents and token ids are valid" in capsys.readouterr().out
    path = out / "train_00000.bin"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    assert main(["data", "check", str(out)]) == 1
    assert "error: " in (said := capsys.readouterr().err)
    assert "has changed since it was written" in said
    path.write_bytes(content[:-1])
    assert main(["data", "check", str(out)]) == 1
    assert "bytes long instead of" in capsys.readouterr().err


def test_bad_text_is_reported(tmp_path, capsys):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"|".join([b"fine text", b"b\xffd"] * 40))
    out = ["--out", str(tmp_path / "out"), "--validation", "5", "--separator", "|"]
    command = ["data", str(path), *out, *SMALL[2:], "--vocab-size", "265"]
    assert main(command) == 1
    assert "40 of its first 559 bytes are invalid" in capsys.readouterr().err
    assert main([*command, "--replace-invalid"]) == 0
    said = capsys.readouterr().out
    assert "40 documents were not valid UTF-8: 40 invalid sequences became U+FFFD" in said
    assert "validation is every 5th document" in said


def test_without_arguments_the_standard_library(tmp_path, monkeypatch, capsys):
    few = sources.standard_library()[:40]
    monkeypatch.setattr(sources, "standard_library", lambda: few)
    monkeypatch.setattr(verb, "NANO_VOCABULARY", 1024)
    assert main(["data", "--out", str(tmp_path / "out"), "--workers", "1"]) == 0
    assert "1,024 tokens in the vocabulary" in capsys.readouterr().out
    ShardedTokens(tmp_path / "out").check()


def test_errors_are_sentences(tmp_path, capsys):
    assert main(["data", str(tmp_path / "nothing.txt"), "--out", str(tmp_path / "x")]) == 1
    assert "there is no file or folder" in capsys.readouterr().err
    assert main(["data", "check", str(tmp_path)]) == 1
    assert "has no index.json" in capsys.readouterr().err
    assert main(["data", "check"]) == 1
    assert "takes one folder" in capsys.readouterr().err
