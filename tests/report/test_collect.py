"""What is found in a folder of results."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("jinja2")

from kalman_attention.cli.main import main
from kalman_attention.evaluation.questions import BENCHMARKS
from kalman_attention.published import WHERE
from kalman_attention.recipes import mad
from kalman_attention.recipes.cell import Results
from kalman_attention.recipes.pretrain import recipe
from kalman_attention.recipes.registry import EXPERIMENTS, load_experiment
from kalman_attention.report.collect import TITLES, collect, read_verdicts
from kalman_attention.report.curves import learning_curves, scaling_charts, words
from kalman_attention.report.language import quality_table
from kalman_attention.report.page import render_page

RESULTS = Path(__file__).parents[2] / "results"
LABEL = re.compile(r"\b(fig|tab|sec|eq|app|thm?):[\w-]+", re.IGNORECASE)


def compared(model="kla-micro", bits=2.0):
    return {
        "summary": {"model": model, "parameters": 2_000_000, "tokens": 10_000_000},
        "recipe": {"model": model},
        "validation": {"bits_per_byte": bits},
        "curve": [
            {"tokens": 1_000_000 * t, "bits_per_byte": bits + 1 / t} for t in range(1, 11)
        ],
    }  # fmt: skip


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))


@pytest.fixture(scope="module")
def sections():
    return collect(RESULTS)


def test_all_our_results_are_on_one_page(sections):
    page = render_page("Title", "Lead.", sections, read_verdicts(RESULTS))
    names = [section.name for section in sections]
    assert names[0] == "language models"
    folders = {path.name.removesuffix("-cpu") for path in RESULTS.glob("*-cpu")}
    assert folders <= set(names)
    body = page[page.index("<body>") : page.index("<script>")]
    assert not LABEL.search(body)
    for section in sections:
        assert section.tables or section.charts or section.images, section.name
        for note in section.notes:
            assert sum(note in table.notes for table in section.tables) == len(section.tables)


def test_verdicts_name_what_there_is(sections):
    verdicts = read_verdicts(RESULTS)
    shown = {section.name for section in sections}
    assert {verdict.verdict for verdict in verdicts} == {"confirmed", "refuted", "open"}
    for verdict in verdicts:
        assert verdict.paper in WHERE
        assert set(verdict.experiments) <= shown
        assert len(verdict.claim) > 10
        assert len(verdict.evidence) > 10


def test_every_label_has_a_place_in_print():
    for name in EXPERIMENTS:
        source = load_experiment(name).source or ""
        for found in LABEL.finditer(source):
            assert found[0] in WHERE
    assert set(TITLES) <= set(EXPERIMENTS)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"verdict": "maybe"}, "verdict in .* must be one of confirmed, refuted, open"),
        ({"claim": 3}, "claim in .* must be text"),
        ({"colour": "red"}, "has unknown fields"),
    ],
)
def test_verdicts_are_checked(tmp_path, change, told):
    good = {"claim": "c", "verdict": "open", "scale": "s", "evidence": "e", "paper": "p"}
    write(tmp_path / "verdicts.json", {"verdicts": [good | change]})
    with pytest.raises(ValueError, match=told):
        read_verdicts(tmp_path)


def test_no_folder_has_no_results(tmp_path, capsys):
    assert collect(tmp_path / "none") == []
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "contains no results" in capsys.readouterr().err


def test_what_compare_wrote(tmp_path):
    for folder in (tmp_path, tmp_path / "pretraining"):
        sure = {"ece": 0.0213, "aurc": 0.4}
        write(folder / "kla.json", compared(bits=2.0) | {"calibration": sure})
        write(folder / "mamba.json", compared("mamba-micro", bits=1.9))
        write(folder / "speed.json", {"tokens_per_second": {"kla": 1234.4}})
    write(tmp_path / "other.json", {"anything": 1})
    first, second = collect(tmp_path)
    assert first.title == second.title == "Language models"
    assert first.tables == second.tables
    rows = first.tables[0].rows
    assert rows[0] == ["mamba-micro", "2,000,000", "10,000,000", "1.9000", "-", "-", "-"]
    assert rows[1] == [
        "kla-micro",
        "2,000,000",
        "10,000,000",
        "2.0000",
        "0.0213",
        "0.4000",
        "1,234",
    ]
    assert first.text == "2 models of 2.0 M parameters, trained on 10 M tokens."
    (chart,) = first.charts
    assert [line.name for line in chart.lines] == ["mamba", "kla"]
    assert chart.lines[0].points[0] == (1.0, 2.9)


def test_seeds_share_a_row_and_the_plain_name_stands_for_them(tmp_path):
    tasks = {name: {b.metric: 0.5, "items": 10} for name, b in BENCHMARKS.items()}
    for name, bits, more in (
        ("kla", 2.0, {"zero_shot": {"tasks": tasks}}),
        ("kla-seed1", 1.8, {}),
    ):
        found = compared(bits=bits) | more
        write(tmp_path / f"{name}.json", found | {"recipe": {"model": "kla-micro", "seed": bits}})
    (section,) = collect(tmp_path)
    quality, zero_shot = section.tables
    assert quality.rows[0][3:5] == ["1.9000", "2.0000, 1.8000"]
    assert zero_shot.rows[0][:2] == ["this run", "kla-micro"]
    assert [line.name for line in section.charts[0].lines] == ["kla"]


@pytest.mark.parametrize(
    "change",
    [
        {"summary": {}},
        {"recipe": 3},
        {"validation": {"bits_per_byte": "low"}},
        {"curve": 3},
        {"curve": [{"tokens": "many"}]},
        {"calibration": {"ece": None, "aurc": 0.1}},
        {"zero_shot": 3},
        {"zero_shot": {"tasks": []}},
        {"zero_shot": {"tasks": {"piqa": {"acc": "high", "items": 1}}}},
    ],
)
def test_damaged_comparisons_are_refused(tmp_path, change):
    write(tmp_path / "kla.json", compared() | change)
    with pytest.raises(ValueError, match=r"in .*kla\.json must be"):
        collect(tmp_path)


def run(folder, *, finished):
    chosen = recipe("kla-nano", seq_len=32, micro_batch=2, batch_tokens=64, tokens=256)
    write(folder / "pretrain.json", {"recipe": dataclasses.asdict(chosen)})
    records = [
        {"kind": "train", "step": 1, "loss": 5.0, "seconds": 1.0},
        {"kind": "train", "step": 2, "loss": None, "seconds": 2.0},
        {"kind": "eval", "step": 2, "loss": 4.0, "bits_per_byte": 3.5, "seconds": 2.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    (folder / "list.json").write_text("[]")  # what else is in a run is not looked at
    if finished:
        write(folder / "summary.json", {"model": "kla-nano", "parameters": 3, "tokens": 256})


def test_folders_of_pretraining_runs(tmp_path, capsys):
    run(tmp_path / "a", finished=True)
    run(tmp_path / "b", finished=False)
    (section,) = collect(tmp_path)
    assert section.title == "Pretraining runs"
    assert section.tables[0].rows == [
        ["a", "kla-nano", "3", "128", "finished", "3.5000"],
        ["b", "kla-nano", "-", "128", "2 of 4 updates", "3.5000"],
    ]
    assert [chart.lines[0].points for chart in section.charts] == [[(128e-6, 3.5)], [(64e-6, 5.0)]]
    (alone,) = collect(tmp_path / "a")
    assert alone.tables[0].rows == section.tables[0].rows[:1]
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert "Pretraining runs" in (tmp_path / "page.html").read_text()


def test_a_run_that_has_just_begun(tmp_path):
    run(tmp_path / "a", finished=False)
    (tmp_path / "a" / "metrics.jsonl").unlink()
    (section,) = collect(tmp_path)
    assert section.tables[0].rows[0][3:] == ["0", "0 of 4 updates", "-"]
    assert section.charts == []


def test_curves_over_seeds_are_medians():
    experiment = load_experiment("mad")

    def result(seed, *accuracies):
        return {
            "labels": {"model": "kla", "task": "noisy_recall", "lr": "lr0.003", "seed": seed},
            "curve": [{"step": i, "accuracy": x} for i, x in enumerate(accuracies)],
        }

    results = [
        result("seed0", 0.1, 0.5, None),
        result("seed1", 0.2, 0.7),
        result("seed2", 0.9, 0.8),
    ]
    (panel,) = learning_curves(experiment, results).items()
    assert panel == ("noisy recall", {("kla", "rate 0.003"): [(0.0, 0.2), (1.0, 0.7)]})
    assert learning_curves(experiment, [{**results[0], "curve": None}]) == {}


@pytest.mark.parametrize(
    ("label", "meant"),
    [
        ("lr0.003", "rate 0.003"),
        ("1blocks", "1 block"),
        ("12blocks", "12 blocks"),
        ("length4", "length 4"),
        ("d128", "width 128"),
        ("selective_copying", "selective copying"),
        ("a4xz5", "A4 x Z5"),
        ("s5", "S5"),
        ("kla", "kla"),
    ],
)
def test_labels_for_people(label, meant):
    assert words(label) == meant


def test_scaling_is_drawn_from_its_numbers(tmp_path):
    row = {"seconds": {"128": 0.001, "256": 0.002}, "gave_up": None}
    lost = {"seconds": {}, "gave_up": "out of memory"}
    sweep = {"shape": "B=1", "passes": {"forward": {"cpu": row, "mobius": lost}}}
    write(tmp_path / "scaling-cpu" / "scan.json", {"sweep": sweep})
    (section,) = collect(tmp_path)
    (chart,) = section.charts
    assert [(line.name, line.points) for line in chart.lines] == [("cpu", [(128, 1.0), (256, 2.0)])]
    assert "mobius end" in chart.caption
    assert scaling_charts({"forward": {"mobius": lost}}, "B=1") == []
    write(tmp_path / "scaling-cpu" / "scan.json", {"sweep": {"shape": "B=1", "passes": 3}})
    with pytest.raises(ValueError, match=r"sweep\.passes in .*scan\.json must be an object"):
        collect(tmp_path)


def test_half_an_experiment_says_so(tmp_path):
    results, cell = Results(tmp_path, "smoke"), mad.cells("smoke")[0]
    metrics = {"accuracy": 0.5, "token_accuracy": 0.5}
    results.save(cell, {"metrics": metrics, "curve": [{"step": 1, "accuracy": 0.5}]})
    (section,) = collect(tmp_path)
    assert section.done == (1, len(mad.cells("smoke")))
    page = render_page("Title", "Lead.", [section])
    assert f'class="part">1 of {section.done[1]} runs' in page


def test_what_was_not_measured_has_a_dash():
    assert quality_table({"a": compared()}, {}).rows[0][-1] == "-"
    sure = compared() | {"calibration": {"ece": 0.0123, "aurc": 0.5}}
    table = quality_table({"a": sure, "b": compared("mamba-micro")}, {})
    assert table.header[-3:] == ["ECE", "AURC", "tokens/s"]
    assert [row[-3:] for row in table.rows] == [["0.0123", "0.5000", "-"], ["-", "-", "-"]]


def test_figures_of_an_experiment_that_are_not_drawn_from_numbers(tmp_path):
    results, cell = Results(tmp_path, "smoke"), mad.cells("smoke")[0]
    results.save(cell, {"metrics": {"accuracy": 0.5, "token_accuracy": 0.5}})
    for name in ("learning_curves", "noisy_recall"):
        (tmp_path / "mad-smoke" / f"{name}.svg").write_text("<svg/>")
    (section,) = collect(tmp_path)
    assert [caption for _, caption in section.images] == ["Noisy recall."]
    assert section.charts == []
