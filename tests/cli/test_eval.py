"""``kla eval``: tables, files, and errors."""

import json
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from kalman_attention.cli.main import main
from kalman_attention.cli.verbs.eval import score_table
from kalman_attention.data.shards import ShardedTokens
from kalman_attention.report.language import zero_shot_table
from tests.data.small import shards
from tests.evaluation.checkpoints import checkpoint, model, tokenizer
from tests.evaluation.test_likelihood import one_by_one

FILES = Path(__file__).parents[1] / "evaluation" / "fixtures"


def test_tasks(tmp_path, capsys):
    pytest.importorskip("lm_eval")
    checkpoint(tmp_path / "mine")
    out = tmp_path / "new" / "result.json"
    given = ["--task-data", str(FILES), "--limit", "2", "--no-bos", "--out", str(out)]
    assert main(["eval", str(tmp_path / "mine"), *given]) == 0
    said = capsys.readouterr().out
    assert "bos False, limit 2, data local files" in said
    result = json.loads(out.read_text())
    assert result["settings"]["bos"] is False
    assert len(result["tasks"]) == 8
    assert all({"acc", "acc_stderr", "items"} <= set(s) for s in result["tasks"].values())
    lines = [line.split() for line in said.splitlines()]
    assert ["this", "run", "mine"] in [line[:3] for line in lines]
    assert sum(line[:1] == ["paper"] for line in lines) == 10


def test_without_the_harness(tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "kalman_attention.evaluation.zero_shot", raising=False)
    for name in ("lm_eval", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["eval", str(checkpoint(tmp_path)), "--task-data", str(FILES)]) == 1
    assert "pip install 'kalman_attention[eval]'" in capsys.readouterr().err


def test_tables():
    tasks = {
        "piqa": {"items": 4, "metric": "acc", "acc": 0.5, "acc_stderr": 0.25, "acc_norm": 0.75},
        "arc_challenge": {"items": 1, "metric": "acc_norm", "acc": 1.0, "acc_norm": 0.125},
        "other": {"items": 1, "metric": None, "acc": 0.0, "acc_stderr": math.nan},
    }
    rows = [line.split() for line in score_table(tasks).splitlines()[2:]]
    assert rows[0] == ["piqa", "4", "50.0", "+-", "25.0", "75.0", "acc"]
    assert rows[1] == ["arc_challenge", "1", "100.0", "12.5", "acc_norm"]
    assert rows[2] == ["other", "1", "0.0", "-", "-"]
    table = zero_shot_table({"m": tasks})
    assert table.header == ["from", "model", "PIQA", "ARC-C", "mean"]
    assert table.rows[0] == ["this run", "m", "50.0", "12.5", "31.2"]
    assert table.rows[1] == ["paper", "GPT-45M", "58.0", "20.6", "39.3"]


def test_bits_per_byte_of_a_text(tmp_path, capsys):
    written = "the filter sees\n\u00e4h 1234"
    path = tmp_path / "a.txt"
    path.write_text(written, encoding="utf-8")
    out = tmp_path / "r.json"
    checkpoint(tmp_path / "m")
    assert main(["eval", str(tmp_path / "m"), "--text", str(path), "--out", str(out)]) == 0
    [found] = json.loads(out.read_text())["texts"].values()
    text = tokenizer()
    nats = -one_by_one(model(), [text.bos], text.encode(written))[0]
    assert found["bytes"] == len(written.encode())
    assert found["bits_per_byte"] == pytest.approx(
        nats / math.log(2) / len(written.encode()), rel=1e-5
    )
    windows = ["--max-length", "4", "--stride", "2", "--num-samples", "3"]
    assert main(["eval", str(tmp_path / "m"), "--text", str(path), *windows]) == 0
    assert "windows of 4 by 2; posterior samples: 3" in capsys.readouterr().out


def test_weights_in_bfloat16(tmp_path):
    checkpoint(tmp_path / "m")
    path = tmp_path / "text.txt"
    path.write_text("the filter believes noisy values a little " * 8)
    found = []
    for options in ([], ["--dtype", "bfloat16"]):
        out = tmp_path / "out.json"
        given = ["eval", str(tmp_path / "m"), "--text", str(path), "--out", str(out)]
        assert main([*given, *options]) == 0
        [score] = json.loads(out.read_text())["texts"].values()
        found.append(score["bits_per_byte"])
    assert found[0] == pytest.approx(found[1], rel=0.02)
    assert found[0] != found[1]


def test_bits_per_byte_of_shards(tmp_path, capsys):
    checkpoint(tmp_path / "m")
    out = tmp_path / "r.json"
    data = shards(tmp_path, tokenizer=str(tmp_path / "m"))
    given = ["eval", str(tmp_path / "m"), "--shards", str(data), "--out", str(out)]
    assert main(given) == 0
    [found] = json.loads(out.read_text())["texts"].values()
    index = ShardedTokens(data).index
    assert found["bytes"] == index.total("bytes", "validation")
    documents = index.total("documents", "validation")
    assert found["tokens"] == index.total("tokens", "validation") - documents
    assert 0.0 < found["bits_per_byte"] < 20.0


def test_shards_of_another_tokenizer(tmp_path, capsys):
    checkpoint(tmp_path / "m")
    data = shards(tmp_path, vocab_size=280)
    assert main(["eval", str(tmp_path / "m"), "--shards", str(data)]) == 1
    assert "not the one that made the shards" in capsys.readouterr().err
