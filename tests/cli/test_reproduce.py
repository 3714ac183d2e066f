import io
import json

import pytest

from kalman_attention.cli.main import main
from kalman_attention.cli.watch import CellProgress, last_record
from kalman_attention.recipes.cell import Results
from kalman_attention.recipes.inspection import trained_kla
from kalman_attention.recipes.registry import load_experiment

pytest.importorskip("matplotlib")


def reproduce(folder, *args: str) -> int:
    return main(["reproduce", *args, "--scale", "smoke", "--out", str(folder)])


def test_cells_become_tables_curves_and_one_page(tmp_path, capsys):
    assert reproduce(tmp_path, "mad", "--only", "kla/selective_copying") == 0
    printed = capsys.readouterr().out
    assert "MAD, macro accuracy" in printed
    assert "(90.7)" in printed  # the paper's figure stands beside ours
    folder = tmp_path / "mad-smoke"
    assert {p.name for p in folder.iterdir()} >= {
        "tables.md",
        "learning_curves.png",
        "learning_curves.svg",
    }
    assert reproduce(tmp_path, "variance") == 0
    assert (tmp_path / "variance-smoke" / "variance.svg").exists()
    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "kla reproduce mad --scale smoke" in page
    assert "Posterior variance" in page


def test_listing_and_showing_compute_nothing(tmp_path, capsys):
    assert reproduce(tmp_path, "a5", "--list") == 0
    assert capsys.readouterr().out.split() == [c.name for c in load_experiment("a5").cells("smoke")]
    assert reproduce(tmp_path, "mqar", "--table") == 0
    assert "> 95" not in capsys.readouterr().out  # the smoke scale has no width 256
    assert not list(tmp_path.rglob("cells"))


def test_listing_tells_results_of_other_configurations(tmp_path, capsys):
    results, cells = Results(tmp_path, "smoke"), load_experiment("a5").cells("smoke")
    found = {"metrics": {"accuracy": 0.5}, "curve": [], "positions": []}
    results.save(cells[0], found)
    results.save(cells[1], found)
    kept = json.loads(results.path(cells[1]).read_text())
    kept["config"]["batch_size"] += 1
    results.path(cells[1]).write_text(json.dumps(kept))
    assert reproduce(tmp_path, "a5", "--list") == 0
    shown = capsys.readouterr().out.splitlines()
    marks = ["done", "old ", *["    "] * (len(cells) - 2)]
    assert shown == [f"{mark} {cell.name}" for mark, cell in zip(marks, cells, strict=True)]


def test_mistakes_get_help(tmp_path, capsys):
    assert reproduce(tmp_path, "mad", "--only", "kla/copying") == 1
    assert "kla/selective_copying/lr0.001/seed0" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 1
    assert "kla reproduce mad --scale smoke" in capsys.readouterr().err
    with pytest.raises(ValueError, match="kla reproduce mad --scale smoke --only kla/recall/lr"):
        trained_kla(Results(tmp_path, "smoke"), "smoke", "recall")


def test_watching_reads_the_last_lines_of_running_cells(tmp_path):
    results = Results(tmp_path, "smoke")
    cell = load_experiment("a5").cells("smoke")[0]
    folder = results.workplace(cell)
    stream = io.StringIO()
    watch = CellProgress(results, stream=stream, period=0.0)
    watch([cell])
    assert stream.getvalue() == ""  # it has written nothing yet
    folder.mkdir(parents=True)
    records = [
        {"kind": "train", "step": 2, "loss": 1.5},
        {"kind": "eval", "step": 2, "accuracy": 0.25},
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text + '{"kind": "tra')
    assert last_record(folder / "metrics.jsonl") == {**records[0], **records[1]}
    watch([cell])
    assert f"{cell.name}  step 2  loss 1.500  accuracy 0.250" in stream.getvalue()
