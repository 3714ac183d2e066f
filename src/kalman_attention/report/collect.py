"""The results under a folder, as verdicts and sections of a page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kalman_attention._reading import checked, read_json
from kalman_attention.recipes.cell import Results
from kalman_attention.recipes.experiment import SCALES, Experiment, Scale
from kalman_attention.recipes.registry import EXPERIMENTS, load_experiment
from kalman_attention.report import curves
from kalman_attention.report.charts import Chart
from kalman_attention.report.curves import words
from kalman_attention.report.language import language_models
from kalman_attention.report.page import Section, Verdict, check_inside

VERDICTS = "verdicts.json"
"""The file with the verdicts on the claims of the paper, next to the results they rest on."""

TITLES = {
    "mad": "MAD",
    "mad-bare": "MAD without encoder and decoder",
    "mad-variations": "MAD with more epochs, or with smaller embeddings",
    "process-noise": "Process noise",
    "ou-depth": "Depth, with and without the OU prior",
    "mqar": "Long-context recall",
    "text-ladder": "Options of the layer on text",
    "a5": "Permutations of five objects (A5)",
    "a5-curriculum": "A5 with growing lengths",
    "state-tracking": "State tracking over length",
    "rotation": "Rotating blocks where nothing is tracked",
    "uncertainty": "Uncertainty on text",
    "series": "State-space models of series",
    "physionet": "PhysioNet 2012",
    "forecasting": "Forecasting (ETTh1)",
}
"""Headings of experiments; others use their names."""

_PICTURES = {
    "variance": (
        "Posterior variance",
        "fig:posterior-var-sc",
        "Variance over one sequence of selective copying, by channel and averaged, with the gain "
        "below; lines mark the tokens to copy.",
    ),
    "attention-maps": (
        "Kalman attention maps",
        "sec:attention-viz",
        "The weight of token s in the read-out at token t, in four channels.",
    ),
}

_DRAWN = ("learning_curves", "accuracy_over_length", "fewest_blocks")
"""Figures that the page draws itself from the numbers, instead of including the files."""


def read_verdicts(root: Path) -> list[Verdict]:
    """The verdicts in a folder of results; empty if it has none."""
    path = root / VERDICTS
    if not path.is_file():
        return []
    check_inside(path, root)
    found: list[Verdict] = checked(
        list[Verdict], read_json(path).get("verdicts"), "verdicts", str(path)
    )
    return found


def collect(root: Path) -> list[Section]:
    """Sections for everything that has results: language models, experiments, figures, speed."""
    if not root.is_dir():
        return []
    found = list(language_models(root))
    for scale in SCALES:
        results = Results(root, scale)
        for name in EXPERIMENTS:
            found += _experiment(load_experiment(name), scale, results)
        for name in _PICTURES:
            found += _pictures(name, scale, results)
        found += _scaling(scale, results)
    return found


def _experiment(experiment: Experiment, scale: Scale, results: Results) -> Iterator[Section]:
    if not results.folder(experiment.name).is_dir():
        return
    cells = experiment.cells(scale)
    for cell in cells:
        check_inside(results.path(cell), results.root)
    there = [r for c in cells if (r := results.load(c)) is not None]
    if not there:
        return
    try:
        tables = experiment.tables(scale, there)
        charts = _charts(experiment, scale, there)
    except (KeyError, IndexError, TypeError) as error:
        where = results.folder(experiment.name) / "cells"
        named = ", ".join(results.path(c).name for c in cells if results.path(c).is_file())
        raise ValueError(
            f"results in {where} lack {error}, which a table needs: {named}"
        ) from error
    yield Section(
        name=experiment.name,
        title=TITLES.get(experiment.name, experiment.name.replace("-", " ").capitalize()),
        text=f"{_sentence(EXPERIMENTS[experiment.name])}.",
        source=experiment.source,
        scale=scale,
        command=f"kla reproduce {experiment.name} --scale {scale}",
        done=(len(there), len(cells)),
        tables=tables,
        charts=charts,
        images=[x for x in _images(results, experiment.name) if x[0].stem not in _DRAWN],
    )


def _charts(experiment: Experiment, scale: Scale, there: list[dict[str, Any]]) -> list[Chart]:
    tracked = experiment.name == "state-tracking"
    over_length = curves.tracking_charts(there, scale) if tracked else []
    return over_length or curves.learning_chart(experiment, there)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _pictures(name: str, scale: Scale, results: Results) -> Iterator[Section]:
    title, source, text = _PICTURES[name]
    images = _images(results, name)
    if images:
        yield Section(
            name=name,
            title=title,
            source=source,
            scale=scale,
            command=f"kla reproduce {name} --scale {scale}",
            text=text,
            images=images,
        )


def _images(results: Results, name: str) -> list[tuple[Path, str]]:
    """Figures in the folder of an experiment, with captions."""
    paths = sorted(results.folder(name).glob("*.svg"))
    for path in paths:
        check_inside(path, results.root)
    return [(path, f"{_sentence(words(path.stem))}.") for path in paths]


def _scaling(scale: Scale, results: Results) -> Iterator[Section]:
    path = results.folder("scaling") / "scan.json"
    if not path.is_file():
        return
    check_inside(path, results.root)
    sweep = checked(dict[str, Any], read_json(path).get("sweep"), "sweep", str(path))
    passes = checked(
        dict[str, dict[str, dict[str, Any]]], sweep.get("passes"), "sweep.passes", str(path)
    )
    for kind, engines in passes.items():
        for engine, row in engines.items():
            where = f"sweep.passes.{kind}.{engine}"
            checked(dict[str, float], row.get("seconds"), f"{where}.seconds", str(path))
    shape = checked(str, sweep.get("shape"), "sweep.shape", str(path))
    yield Section(
        name="scaling",
        title="Time over sequence length",
        text="The time that the scan takes with each engine.",
        source="fig:scaling",
        scale=scale,
        command=f"kla reproduce scaling --scale {scale}",
        charts=curves.scaling_charts(passes, shape),
    )
