"""Language models on the page: measurements of ``kla compare``, and runs of ``kla pretrain``."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from kalman_attention import published
from kalman_attention._reading import checked, read_json
from kalman_attention._tables import Table
from kalman_attention.evaluation.questions import BENCHMARKS
from kalman_attention.report.charts import Axis, Chart, Line, Panel, Point
from kalman_attention.report.page import Section, check_inside

_COMPARED = {"summary", "recipe", "validation", "curve"}
_SPEED = "speed.json"
_CALIBRATION = {"ece": "ECE", "aurc": "AURC"}
_HIDDEN = 0.1  # the first tenth of the tokens, where all curves fall steeply


def repetitions(recipes: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Names of runs that differ in nothing but the seed, together.

    Args:
        recipes: recipe of each run, by name.
    """
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name, recipe in recipes.items():
        kind = {k: v for k, v in recipe.items() if k != "seed"}
        known = next((names for other, names in groups if other == kind), None)
        if known is None:
            groups.append((kind, [name]))
        else:
            known.append(name)
    return [names for _, names in groups]


def quality_table(results: Mapping[str, Mapping[str, Any]], speed: Mapping[str, float]) -> Table:
    """What each model has learned, as the mean over its seeds, and how fast it trains.

    Args:
        results: output of ``kla compare`` for each run, by name.
        speed: tokens per second, by name; empty if not measured.
    """
    groups = repetitions({name: found["recipe"] for name, found in results.items()})
    known = [found["calibration"] for found in results.values() if "calibration" in found]
    sure = _CALIBRATION if known else {}
    by_seed = ["by seed"] if any(len(names) > 1 for names in groups) else []
    rows = []
    for names in groups:
        runs = [results[name] for name in names]
        summary = runs[0]["summary"]
        bits = [run["validation"]["bits_per_byte"] for run in runs]
        measured = [run["calibration"] for run in runs if "calibration" in run]
        rows.append(
            [
                summary["model"],
                f"{summary['parameters']:,}",
                f"{summary['tokens']:,}",
                f"{fmean(bits):.4f}",
                *([", ".join(f"{x:.4f}" for x in bits)] if by_seed else []),
                *(f"{fmean(m[k] for m in measured):.4f}" if measured else "-" for k in sure),
                next((f"{speed[name]:,.0f}" for name in names if name in speed), "-"),
            ]
        )
    header = [
        "model",
        "parameters",
        "tokens",
        "bits per byte",
        *by_seed,
        *sure.values(),
        "tokens/s",
    ]
    return Table("Validation bits per byte, and speed in training", header, rows)


def zero_shot_table(runs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """Zero-shot scores: ours first, followed by the paper's, each marked as such.

    Args:
        runs: scores by model and task; all models have the same tasks.
    """
    common = next(iter(runs.values()))
    chosen = [(i, b) for i, b in enumerate(BENCHMARKS.values()) if b.name in common]
    rows = [
        ["this run", name, *_scores([100 * tasks[b.name][b.metric] for _, b in chosen])]
        for name, tasks in runs.items()
    ]
    rows += [
        ["paper", model, *_scores([scores[i] for i, _ in chosen])]
        for model, scores in published.ZERO_SHOT.items()
    ]
    header = ["from", "model", *(b.title for _, b in chosen), "mean"]
    return Table("Zero-shot tasks, ours and the paper's, %", header, rows)


def _scores(scores: list[float]) -> list[str]:
    return [f"{score:.1f}" for score in (*scores, sum(scores) / len(scores))]


def language_models(root: Path) -> Iterator[Section]:
    """Sections about the language models in a folder and in its direct subfolders."""
    folders = [root, *sorted(path for path in root.iterdir() if path.is_dir())]
    runs = {folder: found for folder in folders if (found := _read_run(folder, root))}
    for folder in folders:
        results = {} if folder in runs else _read_compared(folder, root)
        if results:
            yield _compared(folder, root, results)
    if runs:
        yield _pretrained({folder.name: run for folder, run in runs.items()})


def _read_compared(folder: Path, root: Path) -> dict[str, dict[str, Any]]:
    """Results in every file of ``kla compare`` by name, best model first."""
    results = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        check_inside(path, root)
        found = read_json(path)
        if set(found) >= _COMPARED:
            _check(found, str(path))
            results[path.stem] = found
    bits = {name: found["validation"]["bits_per_byte"] for name, found in results.items()}
    groups = repetitions({name: found["recipe"] for name, found in results.items()})
    groups.sort(key=lambda names: fmean(bits[name] for name in names))
    return {name: results[name] for names in groups for name in names}


def _check(found: dict[str, Any], where: str) -> None:
    """Reject a result that lacks a field that is shown."""
    checked(dict[str, Any], found.setdefault("zero_shot", {}), "zero_shot", where)
    tasks = found["zero_shot"].setdefault("tasks", {})
    checked(dict[str, Any], found["recipe"], "recipe", where)
    needed: list[tuple[str, str, Any]] = [
        ("summary", "model", str),
        ("summary", "parameters", int),
        ("summary", "tokens", int),
        ("validation", "bits_per_byte", float),
        ("zero_shot", "tasks", dict[str, dict[str, Any]]),
    ]
    if "calibration" in found:
        needed += [("calibration", name, float) for name in _CALIBRATION]
    for part, name, kind in needed:
        inner = checked(dict[str, Any], found[part], part, where)
        checked(kind, inner.get(name), f"{part}.{name}", where)
    for name, benchmark in BENCHMARKS.items():
        if name in tasks:
            told = f"zero_shot.tasks.{name}"
            checked(float, tasks[name].get(benchmark.metric), f"{told}.{benchmark.metric}", where)
            checked(int, tasks[name].get("items"), f"{told}.items", where)
    points = checked(list[dict[str, Any]], found["curve"], "curve", where)
    for i, point in enumerate(points):
        checked(int, point.get("tokens"), f"curve[{i}].tokens", where)
        checked(float | None, point.get("bits_per_byte"), f"curve[{i}].bits_per_byte", where)


def _compared(folder: Path, root: Path, results: dict[str, dict[str, Any]]) -> Section:
    speed: dict[str, float] = {}
    if (folder / _SPEED).is_file():
        said = read_json(folder / _SPEED).get("tokens_per_second")
        speed = checked(dict[str, float], said, "tokens_per_second", str(folder / _SPEED))
    tables = [quality_table(results, speed)]
    groups = repetitions({name: found["recipe"] for name, found in results.items()})
    first = {names[0]: results[names[0]] for names in groups}
    scored = {
        found["summary"]["model"]: found["zero_shot"]["tasks"]
        for found in first.values()
        if set(found["zero_shot"]["tasks"]) >= set(BENCHMARKS)
    }
    if scored:
        items = max(tasks[name]["items"] for tasks in scored.values() for name in BENCHMARKS)
        note = (
            f"At most {items} items of each task: standard errors are about {_points(items)} "
            "points. Guessing gives 0, 25, 50, 25, 25, 50, 25 and 50. The paper's models have 45 M "
            "and 180 M parameters."
        )
        tables.append(zero_shot_table(scored)._replace(notes=[note]))
    curves = {
        name: [
            (point["tokens"], point["bits_per_byte"])
            for point in found["curve"]
            if point["bits_per_byte"] is not None
        ]
        for name, found in first.items()
    }
    named = "" if folder in (root, root / "pretraining") else f": {folder.name}"
    return Section(
        name="language models",
        title=f"Language models{named}",
        text=_equal(first),
        source="tab:lm-main",
        tables=tables,
        charts=_bits_charts(curves),
    )


def _points(items: int) -> str:
    return f"{50 / items**0.5:.0f}"


def _equal(results: dict[str, dict[str, Any]]) -> str:
    summaries = [found["summary"] for found in results.values()]
    sizes = [summary["parameters"] / 1e6 for summary in summaries]
    tokens = sorted({f"{summary['tokens'] / 1e6:.0f}" for summary in summaries}, key=float)
    size = " to ".join(dict.fromkeys(f"{edge:.1f}" for edge in (min(sizes), max(sizes))))
    count = "One model" if len(results) == 1 else f"{len(results)} models"
    return f"{count} of {size} M parameters, trained on {' and '.join(tokens)} M tokens."


def _bits_charts(curves: Mapping[str, list[Point]]) -> list[Chart]:
    """Validation bits per byte over tokens, without the steep beginning."""
    lines = [
        Line(name, [(x / 1e6, y) for x, y in points if x >= _HIDDEN * points[-1][0]])
        for name, points in curves.items()
        if points
    ]
    if not lines:
        return []
    return [
        Chart(
            caption="Validation bits per byte over tokens; the first tenth is not shown.",
            panels=[Panel("", lines)],
            x=Axis("million tokens"),
            y=Axis("bits per byte"),
        )
    ]


def _read_run(folder: Path, root: Path) -> dict[str, Any] | None:
    """A run of ``kla pretrain``: its recipe, its summary and its curves."""
    from kalman_attention.evaluation.checkpoint import RUN
    from kalman_attention.recipes.pretrain import PretrainRecipe
    from kalman_attention.recipes.pretrain_run import SUMMARY
    from kalman_attention.train.metrics import METRICS, read_metrics

    if not (folder / RUN).is_file():
        return None
    for name in (RUN, SUMMARY, METRICS):
        check_inside(folder / name, root)
    told = read_json(folder / RUN).get("recipe")
    recipe = checked(PretrainRecipe, told, "recipe", str(folder / RUN))
    summary = read_json(folder / SUMMARY) if (folder / SUMMARY).is_file() else None
    if summary is not None:
        checked(int, summary.get("parameters"), "parameters", str(folder / SUMMARY))
    records = read_metrics(folder) if (folder / METRICS).is_file() else []
    return {"recipe": recipe, "summary": summary, "records": records}


def _pretrained(runs: dict[str, dict[str, Any]]) -> Section:
    """Runs in their current state, finished or not."""
    rows, bits, losses = [], {}, {}
    for name, run in runs.items():
        recipe, summary = run["recipe"], run["summary"]
        bits[name] = _points_of(run, "eval", "bits_per_byte")
        losses[name] = _points_of(run, "train", "loss")
        step = max((record["step"] for record in run["records"]), default=0)
        rows.append(
            [
                name,
                recipe.model,
                f"{summary['parameters']:,}" if summary else "-",
                f"{step * recipe.batch_tokens:,}",
                "finished" if summary else f"{step:,} of {recipe.steps:,} updates",
                f"{bits[name][-1][1]:.4f}" if bits[name] else "-",
            ]
        )
    header = ["run", "model", "parameters", "tokens", "state", "last bits per byte"]
    note = "bits per byte on the part of the validation split that is monitored in training"
    return Section(
        name="pretraining",
        title="Pretraining runs",
        tables=[Table("Runs", header, rows, [note])],
        charts=[*_bits_charts(bits), *_loss_charts(losses)],
    )


def _points_of(run: Mapping[str, Any], kind: str, metric: str) -> list[Point]:
    return [
        (record["step"] * run["recipe"].batch_tokens, record[metric])
        for record in run["records"]
        if record["kind"] == kind and record.get(metric) is not None
    ]


def _loss_charts(losses: Mapping[str, list[Point]]) -> list[Chart]:
    lines = [Line(name, [(x / 1e6, y) for x, y in p]) for name, p in losses.items() if p]
    caption, y = "Training loss over tokens.", Axis("nats per token")
    panels = [Panel("", lines)]
    return [Chart(caption=caption, panels=panels, x=Axis("million tokens"), y=y)] if lines else []
