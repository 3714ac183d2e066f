import html.parser
import io
import json

import pytest

from kalman_attention.cli.main import main
from kalman_attention.cli.watch import Watch, last_record
from kalman_attention.recipes.cell import Results
from kalman_attention.recipes.inspection import trained_kla
from kalman_attention.recipes.registry import load_experiment
from kalman_attention.recipes.table import Table
from kalman_attention.report.page import Section, render_page

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
    check_page((tmp_path / "report.html").read_text(), titles=["mad, scale smoke", "variance"])


def test_listing_and_showing_compute_nothing(tmp_path, capsys):
    assert reproduce(tmp_path, "a5", "--list") == 0
    assert capsys.readouterr().out.split() == [c.name for c in load_experiment("a5").cells("smoke")]
    assert reproduce(tmp_path, "mqar", "--table") == 0
    assert "> 95" not in capsys.readouterr().out  # the smoke scale has no width 256
    assert not list(tmp_path.rglob("cells"))


def test_mistakes_get_help(tmp_path, capsys):
    assert reproduce(tmp_path, "mad", "--only", "kla/copying") == 1
    assert "kla/selective_copying/lr0.001/seed0" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 1
    assert "kla reproduce mad --scale smoke" in capsys.readouterr().err
    with pytest.raises(ValueError, match="kla reproduce mad --scale smoke --only kla/recall"):
        trained_kla(Results(tmp_path, "smoke"), "smoke", "recall")


class Links(html.parser.HTMLParser):
    """Collects everything a page refers to, its anchors, and tags left open."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.anchors: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.references += [found[k] for k in ("href", "src") if k in found]
        if "id" in found:
            self.anchors.add(found["id"])
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_page(page: str, titles: list[str]) -> None:
    links = Links()
    links.feed(page)
    assert not links.open
    for reference in links.references:
        kind = reference[:1]
        assert kind == "#" or reference.startswith("data:"), "the page needs nothing else"
        assert kind != "#" or reference[1:] in links.anchors, "every link is alive"
    for title in titles:
        assert title in page


def test_pages_escape_what_they_show(tmp_path):
    table = Table("<T>", ["a & b"], [["<x>"]], ["n < 1"])
    page = render_page("P", "i", [Section(title="S <1>", text="a < b", tables=[table])])
    check_page(page, ["S &lt;1&gt;"])
    assert "<x>" not in page
    assert "&lt;x&gt;" in page


def test_watching_reads_the_last_lines_of_running_cells(tmp_path):
    results = Results(tmp_path, "smoke")
    cell = load_experiment("a5").cells("smoke")[0]
    folder = results.workplace(cell)
    stream = io.StringIO()
    watch = Watch(results, stream=stream, period=0.0)
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
