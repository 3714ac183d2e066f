"""``kla compare``: runs beside each other, measured once, and only if they can be compared."""

import json
import shutil
import sys

import pytest

pytest.importorskip("tokenizers")

from kalman_attention._tables import Table
from kalman_attention.cli.main import main
from kalman_attention.data.shards import VALIDATION, ShardedTokens
from tests.cli.test_eval import FILES
from tests.cli.test_pretrain import TINY
from tests.data.small import shards

# One group: every worker would train the runs that are compared.
pytestmark = [pytest.mark.usefixtures("no_flush"), pytest.mark.xdist_group("compare")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished runs on the same shards, the second a hybrid."""
    folder = tmp_path_factory.mktemp("compare")
    data = ["--shards", str(shards(folder)), "--quiet"]
    for name in ("kla", "gpt+kla"):
        given = [*TINY, *data, "--out", str(folder / name)]
        assert main(["pretrain", f"{name}-nano", *given]) == 0
    return folder


def compared(runs, *given):
    names = [str(runs / name) for name in ("kla", "gpt+kla")]
    return main(["compare", *names, "--seconds", "0.01", "--out", str(runs / "out"), *given])


def test_tables_and_files(runs, capsys):
    pytest.importorskip("lm_eval")
    pytest.importorskip("sklearn")
    pytest.importorskip("torchmetrics")
    assert compared(runs, "--task-data", str(FILES), "--limit", "2") == 0
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    speed = json.loads((runs / "out" / "speed.json").read_text())["tokens_per_second"]
    for name in ("kla", "gpt+kla"):
        found = json.loads((runs / "out" / f"{name}.json").read_text())
        bits = f"{found['validation']['bits_per_byte']:.4f}"
        parameters = f"{found['summary']['parameters']:,}"
        sure = [f"{found['calibration'][k]:.4f}" for k in ("ece", "aurc")]
        assert [f"{name}-nano", parameters, "256", bits, *sure, f"{speed[name]:,.0f}"] in said
        assert ["this", "run", f"{name}-nano"] in [line[:3] for line in said]
        assert found["zero_shot"]["settings"]["limit"] == 2
        assert len(found["zero_shot"]["tasks"]) == 8
        assert [point["tokens"] for point in found["curve"]] == [128, 256]
    assert (runs / "out" / "curves.svg").is_file()


def test_the_whole_split_is_scored(runs):
    assert compared(runs) == 0
    found = json.loads((runs / "out" / "kla.json").read_text())
    # Fewer tokens than the recipe's limit for evaluations: the run itself saw all of them, too.
    assert ShardedTokens(runs / "shards").index.total("tokens", VALIDATION) < 1 << 20
    assert found["validation"]["bits_per_byte"] == pytest.approx(
        found["summary"]["bits_per_byte"], rel=1e-5
    )


def test_without_the_libraries_for_calibration(runs, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    assert main(["compare", str(runs / "kla"), "--seconds", "0", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "pip install 'kalman_attention[score]'" in said
    assert "ECE" not in said.splitlines()[0]


def test_what_is_measured_is_not_measured_again(runs, monkeypatch):
    from kalman_attention.recipes import comparison

    assert compared(runs) == 0
    monkeypatch.setattr(comparison, "measure", lambda _: pytest.fail("measured again"))
    assert compared(runs) == 0
    other = json.loads((runs / "out" / "kla.json").read_text())
    (runs / "out" / "kla.json").write_text(json.dumps({**other, "weights": "others"}))
    with pytest.raises(pytest.fail.Exception):
        compared(runs)


def test_tasks_are_scored_again_when_they_ask_something_else(runs, monkeypatch, tmp_path):
    from kalman_attention.cli.verbs import compare

    asked = []
    monkeypatch.setattr(
        compare, "_zero_shot", lambda args, found: asked.append(args.task_data) or {"tasks": {}}
    )
    monkeypatch.setattr(compare, "zero_shot_table", lambda tasks: Table("", [], []))
    changed = tmp_path / "files"
    shutil.copytree(FILES, changed)
    (lambada,) = changed.rglob("lambada_openai.jsonl")
    lambada.write_text("\n".join(lambada.read_text().splitlines()[1:]) + "\n")
    for folder in (FILES, FILES, changed):
        assert compared(runs, "--task-data", str(folder), "--limit", "1") == 0
    assert asked == [FILES, FILES, changed, changed]  # two runs, once per folder


def test_a_folder_without_the_tasks_is_refused_before_anything_is_measured(runs, capsys, tmp_path):
    out = tmp_path / "out"
    given = ["compare", str(runs / "kla"), "--out", str(out), "--task-data", str(tmp_path)]
    assert main(given) == 1
    assert "lambada_openai needs lambada/lambada_openai.jsonl" in capsys.readouterr().err
    assert not out.exists()


def other_run(runs, folder, *change):
    given = [*TINY, *change, "--shards", str(runs / "shards"), "--quiet"]
    assert main(["pretrain", "nano", *given, "--out", str(folder)]) == 0
    return str(folder)


def test_unequal_runs_are_refused(runs, capsys, tmp_path):
    other = other_run(runs, tmp_path / "other", "--tokens", "128")
    assert main(["compare", str(runs / "kla"), other]) == 1
    assert "tokens: 256 and 128" in capsys.readouterr().err


def test_runs_with_other_seeds_share_a_row(runs, capsys, monkeypatch, tmp_path):
    from kalman_attention.cli.verbs import compare

    asked = []
    monkeypatch.setattr(
        compare,
        "_zero_shot",
        lambda args, found: asked.append(found.folder.name) or {"tasks": {}},
    )
    monkeypatch.setattr(compare, "zero_shot_table", lambda tasks: Table("", [], []))
    again = other_run(runs, tmp_path / "again", "--seed", "1")
    faster = other_run(runs, tmp_path / "faster", "--lr", "0.01")
    capsys.readouterr()
    names = [str(runs / "kla"), again, str(runs / "gpt+kla"), faster]
    given = ["--seconds", "0.01", "--task-data", str(FILES), "--out", str(tmp_path / "out")]
    assert main(["compare", *names, *given]) == 0
    assert asked == ["kla", "gpt+kla", "faster"]
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    bits = {
        path.stem: json.loads(path.read_text())["validation"]["bits_per_byte"]
        for path in (tmp_path / "out").glob("*.json")
        if path.stem != "speed"
    }
    mean = (bits["kla"] + bits["again"]) / 2
    assert bits["kla"] != bits["again"]
    rows = [row[3:6] for row in table if row[:1] in (["kla-nano"], ["gpt+kla-nano"])]
    assert rows[0] == [f"{mean:.4f}", f"{bits['kla']:.4f},", f"{bits['again']:.4f}"]
    assert [row[0] for row in rows[1:]] == [f"{bits['gpt+kla']:.4f}", f"{bits['faster']:.4f}"]
    speed = json.loads((tmp_path / "out" / "speed.json").read_text())["tokens_per_second"]
    assert set(speed) == {"kla", "gpt+kla", "faster"}


def test_what_is_no_finished_run(runs, capsys, tmp_path):
    assert main(["compare", str(tmp_path)]) == 1
    assert "is not a pretraining run" in capsys.readouterr().err
    (tmp_path / "pretrain.json").write_text("{}")
    assert main(["compare", str(tmp_path)]) == 1
    assert "has not finished" in capsys.readouterr().err
    assert main(["compare", str(runs / "kla"), "--shards", str(tmp_path / "no")]) == 1
    assert "no longer exists" in capsys.readouterr().err
    other = shards(tmp_path, documents=50)
    assert main(["compare", str(runs / "kla"), "--shards", str(other)]) == 1
    assert "does not contain the shards" in capsys.readouterr().err
    assert main(["compare", str(runs / "kla"), str(runs / "kla")]) == 1
    assert "same name" in capsys.readouterr().err
