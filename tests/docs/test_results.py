"""The tables of measured figures say what the result files say."""

import json
import re
import statistics
from typing import Any

import pytest

from kalman_attention._tables import markdown
from kalman_attention.evaluation.questions import BENCHMARKS
from kalman_attention.recipes import mad, mad_scales
from kalman_attention.recipes.cell import Results
from kalman_attention.recipes.experiment import best
from kalman_attention.recipes.registry import load_experiment
from kalman_attention.recipes.series import CHOSEN
from kalman_attention.report.collect import read_verdicts
from kalman_attention.report.language import repetitions
from tests.docs.markdown import ROOT, code, table_rows


def read(path: str) -> dict:
    return json.loads((ROOT / path).read_text())


def rows_of(page: str) -> list[list[str]]:
    return table_rows((ROOT / "docs" / page).read_text())


VERDICTS = ("confirmed", "refuted", "open")
MEASURED = (
    "mad",
    "mad-bare",
    "mad-variations",
    "process-noise",
    "ou-depth",
    "mqar",
    "text-ladder",
    "a5",
    "a5-curriculum",
    "uncertainty",
)


@pytest.mark.parametrize("name", MEASURED)
def test_tables_are_those_of_the_cells(name: str) -> None:
    experiment, results = load_experiment(name), Results(ROOT / "results", "cpu")
    there = [r for c in experiment.cells("cpu") if (r := results.load(c)) is not None]
    rendered = "\n".join(markdown(table) for table in experiment.render("cpu", there))
    assert rendered == (results.folder(name) / "tables.md").read_text()
    page = (ROOT / "docs" / "results.md").read_text().splitlines()
    first, *others = rendered.split("\n### ")
    # Token accuracy, and accuracy by position, stay with the cells.
    shown_too = ("at the rates", "by seed")
    also = [x for x in others if name == "uncertainty" or any(part in x for part in shown_too)]
    shown = "\n".join([first, *also])
    assert [line for line in shown.splitlines() if line.startswith("|") and line not in page] == []


def test_chosen_rates_are_those_with_the_best_validation_accuracy() -> None:
    results, suite = Results(ROOT / "results", "cpu"), mad_scales.SCALES["cpu"]
    there = [r for c in mad.cells("cpu") if (r := results.load(c)) is not None]
    for task, model in {(r["labels"]["task"], r["labels"]["model"]) for r in there}:
        chosen = best(there, task=task, model=model, seed="seed0")
        assert chosen is not None
        assert chosen["labels"]["lr"] == f"lr{suite.chosen(task, model):g}"


def test_hours_are_those_of_the_cells() -> None:
    listed = {row[0]: row[3] for row in rows_of("reproduce.md") if len(row) == 4}
    assert {f"`{name}`" for name in MEASURED} <= set(listed)
    for names, hours in listed.items():
        folders = [ROOT / "results" / f"{name}-cpu" / "cells" for name in code(names)]
        cells = [json.loads(path.read_text()) for x in folders for path in x.glob("*.json")]
        spent = sum(cell.get("seconds") or 0 for cell in cells) / 3600
        assert hours == ("-" if not cells else f"{spent:.1f}" if spent >= 0.05 else "under 0.1")


def test_verdicts_are_those_of_the_file() -> None:
    listed = [row for row in rows_of("results.md") if row[1:2] and row[1] in VERDICTS]
    plain = [[re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell) for cell in row] for row in listed]
    wanted = [[v.claim, v.verdict, v.scale, v.evidence] for v in read_verdicts(ROOT / "results")]
    assert plain == wanted


@pytest.mark.parametrize("name", ["pendulum", "physionet", "forecasting"])
def test_tables_of_series_are_those_of_the_cells(name: str) -> None:
    experiment, results = load_experiment(name), Results(ROOT / "results", "cpu")
    there = [r for c in experiment.cells("cpu") if (r := results.load(c)) is not None]
    rendered = "\n".join(markdown(table) for table in experiment.render("cpu", there))
    assert rendered == (results.folder(name) / "tables.md").read_text()
    page = (ROOT / "docs" / "series_models.md").read_text().splitlines()
    assert [line for line in rendered.splitlines() if line not in page] == []


def test_series() -> None:
    experiment, results = load_experiment("series"), Results(ROOT / "results", "cpu")
    there = [results.load(cell) for cell in experiment.cells("cpu")]
    assert None not in there
    rendered = "\n".join(markdown(table) for table in experiment.render("cpu", there))
    assert rendered == (results.folder("series") / "tables.md").read_text()
    page = (ROOT / "docs" / "series.md").read_text().splitlines()
    assert [
        line for line in rendered.splitlines() if line.startswith("|") and line not in page
    ] == []


def test_the_models_of_series_were_chosen_on_other_hidden_sets() -> None:
    experiment, results = load_experiment("series"), Results(ROOT / "results", "cpu")
    found: dict[tuple[str, str], list[float]] = {}
    for cell in experiment.cells("cpu"):
        result = results.load(cell)
        if result is not None and cell.run.seed >= 100:
            key = cell.labels["series"], cell.labels["model"]
            found.setdefault(key, []).append(result["metrics"]["crps"])
    for name in ("sunspots", "car"):
        means = {key[1]: statistics.mean(x) for key, x in found.items() if key[0] == name}
        assert min(means, key=means.__getitem__) == CHOSEN[name]


def test_goals_of_the_scan() -> None:
    listed = [row for row in rows_of("benchmarks.md") if len(row) == 5]
    goals = read("benchmarks/results/scan_goals_2026-11-16.json")["goals"]
    assert listed == [
        [g["case"], g["against"], f"{g['measured']:.2f}", g["wanted"], "yes" if g["met"] else "no"]
        for g in goals
    ]


def test_goals_of_the_scan_again() -> None:
    goals = read("benchmarks/results/scan_goals_again_2026-11-16.json")["goals"]
    said = ", ".join(f"{goal['measured']:.2f}" for goal in goals)
    assert f"A second run: {said}." in (ROOT / "docs" / "benchmarks.md").read_text()


def test_mixers() -> None:
    results = read("benchmarks/results/mixers_2026-11-18.json")
    expected = [
        [f"{int(T):,}", kind, *(f"{1e3 * x['seconds'][T]:.0f}" for x in mixers.values())]
        for kind, mixers in results["sweep"]["passes"].items()
        for T in mixers["kla"]["seconds"]
    ]
    listed = rows_of("benchmarks.md")
    assert [row for row in listed if len(row) == 8] == expected
    for rival in results["rivals"]:
        ours, theirs = rival["seconds"]["ours"], rival["seconds"]["theirs"]
        times = [f"{1e3 * ours:.0f}", f"{1e3 * theirs:.0f}", f"{theirs / ours:.1f}"]
        about = [rival["mixer"], rival["package"], f"{rival['T']:,}", rival["pass"]]
        assert [*about, *times] in listed


def test_curves_of_many_processes() -> None:
    results = read("results/scale-out/curves.json")
    alone = results["curves"]["one process"]
    for name, curve in results["curves"].items():
        apart = max(abs(x - y) for x, y in zip(curve, alone, strict=True))
        assert apart == results["apart"][name]
    page = " ".join((ROOT / "docs" / "distributed.md").read_text().split())
    said = f"Over {len(alone)} updates in float32 with two ranks the losses are at most"
    assert f"{said} {max(results['apart'].values()):.1e} apart" in page
    assert results["ranks"] == 2


def test_language_models() -> None:
    folder = ROOT / "results" / "pretraining"
    speed = read("results/pretraining/speed.json")["tokens_per_second"]
    names = sorted(path.stem for path in folder.glob("*.json") if path.stem != "speed")
    found = {name: read(f"results/pretraining/{name}.json") for name in names}
    listed = rows_of("results.md")
    groups = repetitions({name: run["recipe"] for name, run in found.items()})
    for first, *others in groups:
        summary, tasks = found[first]["summary"], found[first]["zero_shot"]["tasks"]
        bits = [found[name]["validation"]["bits_per_byte"] for name in (first, *others)]
        by_seed = ", ".join(f"{x:.3f}" for x in bits) if others else "one seed"
        mean = f"{statistics.fmean(bits):.3f}"
        rate = f"{speed[first]:,.0f}" if first in speed else "-"
        assert [first, f"{summary['parameters']:,}", mean, by_seed, rate] in listed
        scores = [100 * tasks[b.name][b.metric] for b in BENCHMARKS.values()]
        mean_score = sum(scores) / len(scores)
        assert [first, *(f"{score:.1f}" for score in (*scores, mean_score))] in listed
    assert set(speed) <= {names[0] for names in groups}
    # One footing: nothing but the model and the seed differs.
    recipes = [{**run["recipe"], "model": None, "seed": None} for run in found.values()]
    assert all(recipe == recipes[0] for recipe in recipes)


TRACKERS = {
    "rotating KLA": "rotating-kla",
    "KLA": "kla",
    "Mamba": "mamba",
    "Gated DeltaNet": "gated-deltanet",
    "Gated DeltaNet, negative eigenvalues": "gated-deltanet-negative",
    "attention": "attention",
    "LSTM": "lstm",
}


def tracked(model: str, group: str, seed: int, depth: int = 1) -> list[float]:
    name = f"{model},{group},{depth}blocks,seed{seed}"
    found = read(f"results/state-tracking-cpu/cells/{name}.json")
    return [100 * x["accuracy"] for x in found["lengths"].values()]


def test_state_tracking() -> None:
    rows = rows_of("state_tracking.md")
    for name, model in TRACKERS.items():
        one, two = (row[1:] for row in rows if row[0] == name)
        for depth, listed in ((1, one), (2, two)):
            for cell, group in zip(listed, ("parity", "z60", "a4xz5", "a5", "s5"), strict=True):
                runs = range(5 if group == "a5" else 1)
                seeds = [tracked(model, group, seed, depth) for seed in runs]
                medians = [statistics.median(x) for x in zip(*seeds, strict=True)]
                assert cell == " / ".join(f"{medians[i]:.0f}" for i in (0, 3, 4))
    for seed in range(5):
        (listed,) = (row[1:] for row in rows if row[0] == f"seed {seed}")
        wanted = [f"{x:.1f}".removesuffix(".0") for x in tracked("rotating-kla", "a5", seed)]
        assert listed == wanted


FORMS = {
    "the paper's layer": "kla",
    "shared by blocks of four": "shared 4",
    "the same, rotating": "shared 4, rotating",
    "the initialisation of `KLAConfig.tracking`": "tracking initialisation",
}


def test_rotation_where_nothing_is_tracked() -> None:
    rows = rows_of("state_tracking.md")
    for name, form in FORMS.items():
        (listed,) = (row[1:] for row in rows if row[0] == name)
        recall, copying = (
            [read(f"results/rotation-cpu/cells/{form},{task},seed{seed}.json") for seed in (0, 1)]
            for task in ("recall", "selective_copying")
        )
        assert listed[0] == ", ".join(f"{percent(x)} ({x['steps']:,})" for x in recall)
        assert listed[1] == ", ".join(percent(x) for x in copying)
        if listed[2]:
            text = [
                read(f"results/text-ladder-cpu/cells/{form},seed{seed}.json") for seed in (100, 101)
            ]
            assert listed[2] == ", ".join(f"{x['metrics']['bits_per_byte']:.3f}" for x in text)


def percent(result: dict[str, Any]) -> str:
    return f"{100 * result['metrics']['accuracy']:.1f}"


def test_decoding_a_model() -> None:
    measured = read("benchmarks/results/decode_model_2026-11-17.json")["kla-45m"]
    listed = [row for row in rows_of("benchmarks.md") if row[0] in ("float32", "bfloat16")]
    assert listed == [
        [x["weights"], *(f"{x[name]:.2f}" for name in ("milliseconds", "bound", "ratio"))]
        for x in measured
    ]


def test_headlines_of_the_readme_are_those_of_the_pages() -> None:
    text = (ROOT / "README.md").read_text()
    rows = table_rows(text[text.index("## Results\n") : text.index("## Install")])
    assert len(rows) >= 5
    for what, *figures in rows:
        (page,) = re.findall(r"\]\(([^)#]+)", what)
        stated = re.findall(r"\d+(?:\.\d+)?", (ROOT / page).read_text().replace(",", ""))
        numbers = re.findall(r"(?<![A-Za-z])\d+(?:\.\d+)?", " ".join(figures))
        assert set(numbers) <= set(stated), what
