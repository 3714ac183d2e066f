"""``kla score``: tables, files, and a foreign paragraph that is found."""

import csv
import json
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("sklearn")
pytest.importorskip("torchmetrics")

from kalman_attention.cli.main import main
from kalman_attention.evaluation.checkpoint import save_checkpoint
from kalman_attention.evaluation.likelihood import document_nats
from tests.data.small import text
from tests.evaluation.checkpoints import checkpoint, model, tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("score") / "tiny", plan="attention + kla")


def written(path, words=120, seed=0):
    path.write_text(text(seed, words), encoding="utf-8")
    return path


def test_files_and_tables(folder, tmp_path, capsys):
    known, file = written(tmp_path / "known.txt", 300, 1), written(tmp_path / "a.txt")
    out = tmp_path / "out"
    given = ["--window", "16", "--reference", str(known), "--out", str(out), "--show", "3"]
    assert main(["score", str(folder), str(file), *given]) == 0
    said = capsys.readouterr().out
    assert "layer 1, counted from 0; layers without: 0 (attention)." in said
    found = json.loads((out / "scores.json").read_text())
    record, lm, words = found["texts"][str(file)], model("attention + kla"), tokenizer()
    ids = words.encode(file.read_text())
    assert record["tokens"] == len(ids) == len(record["token_scores"]["nll"])
    nats = document_nats(lm, words.bos, ids)
    assert sum(record["token_scores"]["nll"]) == pytest.approx(nats, rel=1e-4)
    assert record["perplexity"] == pytest.approx(np.exp(nats / len(ids)), rel=1e-4)
    assert record["gain_of_layers"][0] == [None] * len(ids)
    assert record["gain_of_layers"][1] == pytest.approx(record["token_scores"]["gain"])
    assert "".join(record["text"]) == file.read_text()
    assert (
        set(record["detection"]) == set(record["windows"]) == set(found["reference"]["thresholds"])
    )
    assert 0.0 <= record["calibration"]["ece"] <= 1.0
    with (out / "windows.csv").open() as sheet:
        rows = list(csv.DictReader(sheet))
    assert len(rows) == -(-len(ids) // 16)
    assert float(rows[0]["mahalanobis"]) == pytest.approx(
        record["windows"]["mahalanobis"][0], rel=1e-4
    )
    assert (out / "a.png").stat().st_size > 10_000
    assert (out / "a.svg").is_file()


def test_models_without_a_belief_say_so(tmp_path, capsys):
    checkpoint(tmp_path / "gpt", plan="attention")
    assert main(["score", str(tmp_path / "gpt"), str(written(tmp_path / "a.txt"))]) == 0
    said = capsys.readouterr().out
    assert "none, as this model has no KLA layer" in said
    assert "gain" not in said.partition("\n")[2]


def test_a_foreign_paragraph_stands_out(tmp_path, capsys):
    """A model that knows one kind of text, and another kind pasted into it."""
    words, lm = tokenizer(), model()
    tokens = torch.tensor([words.encode(text(i, 60))[:65] for i in range(64)])
    optimiser = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        lm.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimiser.step()
    (tmp_path / "model").mkdir()
    save_checkpoint(lm, words, tmp_path / "model")
    foreign = "ZQX#~|" * 20
    (tmp_path / "pasted.txt").write_text(f"{text(100, 90)} {foreign} {text(101, 90)}")
    (tmp_path / "known.txt").write_text(text(102, 900))
    given = ["--window", "16", "--reference", str(tmp_path / "known.txt")]
    out = tmp_path / "out"
    pasted = str(tmp_path / "pasted.txt")
    assert main(["score", str(tmp_path / "model"), pasted, *given, "--out", str(out)]) == 0
    found = json.loads((out / "scores.json").read_text())
    record, limits = found["texts"][pasted], found["reference"]["thresholds"]
    inside = [
        "".join(record["text"][i : i + 16]).count("ZQX") for i in range(0, record["tokens"], 16)
    ]
    pure = [i for i, count in enumerate(inside) if count >= 2]
    far = [i for i, count in enumerate(inside) if count == 0]
    assert pure
    for name in ("perplexity", "mahalanobis"):
        values = np.array(record["windows"][name], float)
        assert (values[pure] > limits[name]).all()
        assert values[pure].min() > np.nanmedian(values[far])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--reference", "SHORT"], "longer reference"),
        (["--num-samples", "2"], "last mixer of the plan"),
    ],
)
def test_refusals(tmp_path, capsys, given, told):
    checkpoint(tmp_path / "m", plan="kla + attention")
    (tmp_path / "short.txt").write_text("the filter")
    given = [str(tmp_path / "short.txt") if word == "SHORT" else word for word in given]
    assert main(["score", str(tmp_path / "m"), str(written(tmp_path / "a.txt")), *given]) == 1
    assert told in capsys.readouterr().err


def test_without_the_libraries(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["score", str(folder), str(written(tmp_path / "a.txt"))]) == 1
    assert "pip install 'kalman_attention[score]'" in capsys.readouterr().err


def test_an_empty_file(folder, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    assert main(["score", str(folder), str(tmp_path / "empty.txt")]) == 1
    assert "nothing to score" in capsys.readouterr().err
