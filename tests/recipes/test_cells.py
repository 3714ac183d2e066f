import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kalman_attention._tables import Table, markdown, percent
from kalman_attention.published import MAD, MAD_TASKS, PROCESS_NOISE
from kalman_attention.recipes import mad, mad_scales, mad_variations
from kalman_attention.recipes.cell import Cell, Results, differences, plain
from kalman_attention.recipes.experiment import SCALES, best, mean_of_best
from kalman_attention.recipes.registry import EXPERIMENTS, load_experiment
from kalman_attention.recipes.runner import run_cells
from kalman_attention.tasks.registry import MAD as TASK_NAMES
from kalman_attention.tasks.registry import make_task


@dataclasses.dataclass(frozen=True)
class Count:
    """A run that counts how often it was carried out."""

    value: float
    updates: int = 1

    def execute(self, folder: Path, *, show: bool) -> dict[str, Any]:
        times = folder / "times"
        times.write_text(times.read_text() + "x" if times.exists() else "x")
        return {"metrics": {"accuracy": self.value}, "curve": []}


def cell(name: str, value: float = 0.5) -> Cell:
    return Cell(experiment="toy", labels={"model": name, "seed": "seed0"}, run=Count(value))


def times(results: Results, each: Cell) -> int:
    return len((results.workplace(each) / "times").read_text())


@pytest.mark.parametrize("jobs", [1, 2])
def test_finished_cells_are_not_computed_again(tmp_path, jobs):
    results, cells = Results(tmp_path, "smoke"), [cell("a", 0.25), cell("b", 0.75)]
    said: list[str] = []
    run_cells(cells[:1], results, jobs=jobs, say=said.append)
    found = run_cells(cells, results, jobs=jobs, say=said.append)
    assert [r["metrics"]["accuracy"] for r in found] == [0.25, 0.75]
    assert [times(results, c) for c in cells] == [1, 1]
    assert any("1 of 2 cells are already finished" in line for line in said)


@dataclasses.dataclass(frozen=True)
class Inner:
    """Options that have grown since a result was stored."""

    width: int
    shape: tuple[int, int] = (1, 2)


def test_options_that_came_later_have_their_defaults(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Grown(Count):
        inner: Inner = dataclasses.field(default=Inner(width=3))
        shared: int = 1

    results = Results(tmp_path, "smoke")
    results.save(cell("a"), {"metrics": {}, "curve": []})
    path = results.path(cell("a"))
    stored = json.loads(path.read_text())
    stored["config"]["inner"] = {"width": 3}
    path.write_text(json.dumps(stored))
    grown = dataclasses.replace(cell("a"), run=Grown(0.5))
    assert results.load(grown) is not None
    for other in (Grown(0.5, shared=2), Grown(0.5, inner=Inner(width=3, shape=(1, 1)))):
        with pytest.raises(ValueError, match="a different configuration"):
            results.load(dataclasses.replace(grown, run=other))


@dataclasses.dataclass(frozen=True)
class Die:
    """A run whose process is killed."""

    updates: int = 1

    def execute(self, folder: Path, *, show: bool) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}


def test_a_killed_process_is_named_as_such(tmp_path):
    doomed = Cell(experiment="toy", labels={"model": "a"}, run=Die())
    results = Results(tmp_path, "smoke")
    with pytest.raises(ChildProcessError, match="run the same command again to continue"):
        run_cells([doomed], results, jobs=2, say=lambda line: None)
    assert results.load(doomed) is None


def test_a_result_of_another_configuration_is_refused(tmp_path):
    results = Results(tmp_path, "smoke")
    run_cells([cell("a", 0.25)], results, say=lambda line: None)
    with pytest.raises(ValueError, match=r"value is 0\.25 there and 0\.5 here"):
        results.load(cell("a", 0.5))


def test_results_say_where_they_come_from(tmp_path):
    results = Results(tmp_path, "smoke")
    run_cells([cell("a")], results, say=lambda line: None)
    stored = json.loads(results.path(cell("a")).read_text())
    assert stored["config"] == {"value": 0.5, "updates": 1}
    assert {"torch", "kalman_attention", "processor", "date"} <= set(stored["about"])
    assert not list(tmp_path.rglob("*.tmp"))


def test_differences_name_the_place():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == [
        "a.c is 3 there and 2 here"
    ]
    assert differences({"a": 1}, {}) == ["a is None there and 1 here"]


def test_matching_labels():
    one = cell("kla")
    assert one.matches("kla")
    assert one.matches("seed0/kla/")
    assert not one.matches("kl")
    assert not one.matches("kla/seed1")


def result(model: str, lr: str, seed: str, accuracy: float) -> dict[str, Any]:
    labels = {"model": model, "lr": lr, "seed": seed}
    return {"labels": labels, "metrics": {"accuracy": accuracy}}


def test_rates_are_chosen_by_the_best_and_seeds_are_averaged():
    results = [
        result("kla", "lr1", "seed0", 0.2),
        result("kla", "lr2", "seed0", 0.6),
        result("kla", "lr1", "seed1", 0.8),
        result("gla", "lr1", "seed0", 0.9),
    ]
    assert best(results, model="kla") == results[2]
    assert mean_of_best(results, model="kla") == pytest.approx(0.7)
    assert mean_of_best(results, model="mamba") is None


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_distinct_cells_that_survive_json(name, scale):
    cells = load_experiment(name).cells(scale)
    names = [(c.experiment, c.name) for c in cells]
    assert names
    assert len(set(names)) == len(names)
    for each in cells:
        json.dumps(dataclasses.asdict(each.run))
        assert each.run.updates >= 1
    for table in load_experiment(name).tables(scale, []):  # nothing is there yet
        assert all(len(row) == len(table.header) for row in table.rows)
        assert table.notes


@pytest.mark.parametrize("name", mad_scales.SUITES)
def test_mad_at_cpu_scale_has_all_cells_of_the_papers_table(name):
    every = load_experiment(name).cells("cpu")
    cells = [c for c in every if c.labels["model"] in MAD]
    assert {(c.labels["model"], c.labels["task"]) for c in cells} == {
        (model, task) for model in MAD for task in MAD_TASKS
    }
    ours = {(c.labels["model"], c.labels["task"]) for c in every if c not in cells}
    forms = mad_scales.SUITES[name]["cpu"].forms
    assert ours == {(form, task) for form in forms for task in mad_scales.FORM_TASKS}
    assert forms == (tuple(mad_scales.FORMS) if name == "mad" else ())
    assert set(MAD_TASKS) == set(TASK_NAMES)
    suite = mad_scales.SUITES[name]["cpu"]
    for task in MAD_TASKS:
        rates: dict[str, set[str]] = {}
        for c in every:
            if c.labels["task"] == task:
                rates.setdefault(c.labels["model"], set()).add(c.labels["lr"])
        grid = {f"lr{rate:g}" for rate in suite.rates_of(task)}
        for model, tried in rates.items():  # every mixer has the same grid
            chosen = {f"lr{suite.chosen(task, 'kla'):g}"}
            assert tried == (chosen if model in suite.at_rate_of_kla else grid)
    assert suite.at_rate_of_kla == (("kla+", *mad_scales.FORMS) if name == "mad" else ())


def test_forms_differ_from_the_papers_layer_in_nothing_else():
    cells = {
        c.labels["model"]: c
        for c in load_experiment("mad").cells("cpu")
        if c.matches("selective_copying/lr0.001/seed0")
    }
    for form, options in mad_scales.FORMS.items():
        lines = differences(plain(cells[form].run), plain(cells["kla"].run))
        assert sorted(line.split(" is ")[0] for line in lines) == sorted(
            f"model.kla.{option}" for option in options
        )


def test_mad_has_the_papers_lengths_and_one_scaffold_for_all_models():
    for cell in load_experiment("mad").cells("cpu"):
        run, task = cell.run, cell.run.make_task()
        assert task == make_task(run.task)  # lengths and sizes as published
        assert (run.model.encoder_width, run.model.decoder_widths) == (120, (240, 120))
        assert (run.batch_size, run.eval_batch_size) == (32, 172)
        assert run.training.schedule == "cosine"
    lengths = {t: (s.epochs, s.patience) for t, s in mad_scales.SCALES["cpu"].tasks.items()}
    for cell in load_experiment("mad").cells("cpu"):
        assert (cell.run.training.epochs, cell.run.training.patience) == lengths[cell.run.task]
    for cell in load_experiment("mad-bare").cells("cpu"):
        assert cell.run.model.encoder_width is cell.run.model.decoder_widths is None


def test_the_validation_set_chooses_and_the_test_set_counts():
    lucky, solid = result("kla", "lr1", "seed0", 0.9), result("kla", "lr2", "seed0", 0.8)
    lucky["validation"], solid["validation"] = {"accuracy": 0.5}, {"accuracy": 0.7}
    assert best([lucky, solid], model="kla") == solid
    assert mean_of_best([lucky, solid], model="kla") == 0.8


def test_learning_rates_stand_beside_each_other():
    def run(lr: str, accuracy: float) -> dict[str, Any]:
        labels = {"model": "kla", "task": "fuzzy_recall", "lr": lr, "seed": "seed0"}
        return {"labels": labels, "metrics": {"accuracy": accuracy, "token_accuracy": 0.1}}

    both = [run("lr0.003", 0.9), run("lr0.001", 0.25)]
    chosen, _, rates, _ = load_experiment("mad").tables("cpu", both)
    assert rates.header == ["model", "compression", "fuzzy recall", "selective copying"]
    assert [row for row in rates.rows if row[0] == "kla"] == [
        ["kla", "- / -", "25.0 / 90.0", "- / -"]
    ]
    assert chosen.rows[4][5] == "90.0 (45.7)"
    *_, rates = load_experiment("mad-bare").tables("cpu", both)
    assert [row for row in rates.rows if row[0] == "kla"] == [
        ["kla", *["- / -"] * 4, "90.0 / 25.0", "- / -"]
    ]
    assert len(load_experiment("mad").tables("paper", [])) == 2  # one rate, nothing to compare


def test_more_seeds_repeat_the_chosen_runs():
    suite, cells = mad_scales.SCALES["cpu"], mad.cells("cpu")
    again = [c for c in cells if int(c.labels["seed"].removeprefix("seed")) in suite.more_seeds]
    asked = [(task, row) for task, rows in suite.repeated.items() for row in rows]
    assert len(again) == len(asked) * len(suite.more_seeds)
    for cell in again:
        labels = cell.labels
        assert (labels["task"], labels["model"]) in asked
        assert labels["lr"] == f"lr{suite.chosen(labels['task'], labels['model']):g}"
        (first,) = (c for c in cells if c.labels == {**labels, "seed": "seed0"})
        (line,) = differences(plain(cell.run), plain(first.run))
        assert line == f"training.seed is 0 there and {labels['seed'][-1]} here"
    named = {"task": "compression", "seed": "seed1"}
    assert not [c for c in mad.chosen_cells("cpu", {"compression": ("kla",)}) if c in again]
    assert [c for c in again if named.items() <= c.labels.items()]


def test_seeds_stand_beside_each_other():
    def run(seed: int, accuracy: float, lr: str = "lr0.003") -> dict[str, Any]:
        labels = {"model": "kla", "task": "fuzzy_recall", "lr": lr, "seed": f"seed{seed}"}
        metrics = {"accuracy": accuracy, "token_accuracy": 0.1}
        return {"labels": labels, "metrics": metrics}

    runs = [run(0, 0.125, "lr0.001"), *map(run, range(3), (0.25, 0.5, 0.375))]

    def rows(results, model="kla"):
        accuracy, _, rates, seeds = load_experiment("mad").tables("cpu", results)
        (mean,) = (row[5] for row in accuracy.rows if row[0] == model)
        (tried,) = (row[2] for row in rates.rows if row[0] == model)
        (found,) = (row[2:] for row in seeds.rows if row[:2] == ["fuzzy recall", model])
        return mean, tried, found

    assert rows(runs) == ("37.5 (45.7)", "12.5 / 25.0", ["25.0", "50.0", "37.5", "37.5"])
    assert rows(runs[:3]) == ("37.5 (45.7)", "12.5 / 25.0", ["25.0", "50.0", "-", "-"])
    assert rows(runs, "mamba") == ("- (30.8)", "- / -", ["-", "-", "-", "-"])


def test_a_variation_changes_one_thing():
    runs, suite = mad_variations.cells("cpu"), mad.cells("cpu")
    first = {tuple(c.labels[x] for x in ("model", "task", "seed")): c for c in runs if c in suite}
    varied = [c for c in runs if c not in suite]
    more = len(mad_scales.SCALES["cpu"].more_seeds)
    assert len(varied) == sum(
        len(models) + more * len(variation.repeated.get(task, ()))
        for variation in mad_variations.VARIATIONS.values()
        for task, models in variation.models.items()
    )
    for cell in varied:
        # Computed once, by mad.
        before = first[cell.labels["model"], cell.labels["task"], cell.labels["seed"]]
        (line,) = differences(plain(cell.run), plain(before.run))
        epochs, change = before.run.training.epochs, cell.labels["change"]
        assert (
            line
            == {
                "3 x epochs": f"training.epochs is {epochs} there and {3 * epochs} here",
                "embeddings 0.3": "model.embedding_std is 1.0 there and 0.3 here",
            }[change]
        )


def test_the_published_runs_are_not_varied():
    published = mad.cells("paper")
    assert all(cell in published for cell in mad_variations.cells("paper"))
    (table,) = mad_variations.tables("paper", [])
    assert table.header == ["task", "model", "seed", "mad"]
    assert all(len(row) == 4 for row in table.rows)


def test_variations_stand_beside_the_run_they_vary():
    def rows(labels: str, *accuracies: float) -> list[list[str]]:
        runs = [c for c in mad_variations.cells("cpu") if c.matches(labels)]
        results = [
            {"labels": cell.labels, "metrics": {"accuracy": accuracy}}
            for cell, accuracy in zip(runs, accuracies, strict=True)
        ]
        (table,) = mad_variations.tables("cpu", results)
        return table.rows

    found = rows("kla/fuzzy_recall", 0.25, 0.625)
    assert ["fuzzy recall", "kla", "0", "25.0", "62.5", ""] in found
    assert ["fuzzy recall", "mamba", "0", "-", "-", ""] in found
    copying = rows("kla/selective_copying", 0.2, 0.25, 0.3, 0.5, 0.625, 0.75, 0.125)
    assert [row[2:] for row in copying if row[:2] == ["selective copying", "kla"]] == [
        ["0", "20.0", "50.0", "12.5"],
        ["1", "25.0", "62.5", ""],
        ["2", "30.0", "75.0", ""],
        ["mean", "25.0", "62.5", ""],
    ]
    first = rows("kla/selective_copying/seed0", 0.2, 0.5, 0.125)
    assert ["selective copying", "kla", "mean", "-", "-", ""] in first


def test_tables_say_how_many_runs_are_missing():
    experiment = load_experiment("mad")
    labels = {"model": "kla", "task": "recall", "lr": "lr0.001", "seed": "seed0"}
    one = {"labels": labels, "metrics": {"accuracy": 1.0, "token_accuracy": 1.0}}
    for table in experiment.render("smoke", [one]):
        assert table.notes[-1] == "41 of 42 runs are still missing"
    complete = experiment.render("smoke", [one] * 42)
    assert complete == experiment.tables("smoke", [one] * 42)


def test_the_papers_averages_close():
    # The paper prints the means of these rows: 86.69 and 81.98.
    assert sum(PROCESS_NOISE["learned"].values()) / 6 == pytest.approx(86.69, abs=0.006)
    assert sum(PROCESS_NOISE["zero"].values()) / 6 == pytest.approx(81.98, abs=0.006)


def test_tables_as_markdown():
    table = Table("T", ["a", "b"], [["x", percent(0.5, 61.25)]], ["note"])
    assert markdown(table) == "### T\n\n| a | b |\n| --- | --- |\n| x | 50.0 (61.2) |\n\n- note\n"
    assert percent(None) == "-"
    assert percent(None, "> 95") == "- (> 95)"


def test_the_map_of_a5_counts_the_seeds_that_solve_a_length():
    def run(seed: int, accuracy: float) -> dict[str, Any]:
        labels = {"model": "kla", "length": "length8", "depth": "3blocks", "seed": f"seed{seed}"}
        metrics = {"accuracy": accuracy, "token_accuracy_without_bos": 0.99}
        return {"labels": labels, "metrics": metrics, "positions": []}

    each = [run(0, 0.0), run(1, 0.96), run(2, 0.5)]
    shares, fewest, _ = load_experiment("a5-curriculum").tables("cpu", each)
    assert ["kla", "3", "-", "96 / 99, 1 of 3", "-"] in shares.rows
    assert ["kla", "-", "<= 3", "-"] in fewest.rows
    assert "the best seed, and how many seeds solve the length" in shares.notes
