"""The tables of measured figures say what the result files say."""

import json

from tests.docs.markdown import ROOT, table_rows


def read(path: str) -> dict:
    return json.loads((ROOT / path).read_text())


def rows_of(page: str) -> list[list[str]]:
    return table_rows((ROOT / "docs" / page).read_text())


def test_recall_cells() -> None:
    found = {row[0]: row for row in rows_of("results.md")}
    cells = [
        json.loads(path.read_text())
        for path in sorted((ROOT / "results" / "mad-cpu" / "cells").glob("*,recall,*.json"))
    ]
    assert {cell["labels"]["model"] for cell in cells} == set(found)
    for cell in cells:
        _, accuracy, updates = found[cell["labels"]["model"]]
        assert accuracy.split()[0] == f"{100 * cell['metrics']['accuracy']:.1f}"
        solved = cell["ended_by"] == "target"
        assert updates == (str(cell["steps"]) if solved else f"not within {cell['steps']:,}")


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
    results = read("benchmarks/results/mixers_2026-11-16.json")
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
