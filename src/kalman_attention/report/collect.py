"""The results under a folder, as the sections of a page."""

import os
from collections.abc import Iterator
from pathlib import Path

from kalman_attention._files import write_atomically
from kalman_attention.recipes.cell import Results
from kalman_attention.recipes.experiment import SCALES, Experiment, Scale
from kalman_attention.recipes.machine import about
from kalman_attention.recipes.registry import EXPERIMENTS, load_experiment
from kalman_attention.report.page import Section, render_page

_FIGURES = {
    "variance": "Posterior variance on selective copying; lines mark the tokens to copy",
    "attention-maps": "Kalman attention maps: the weight of token s in the read-out at token t",
    "scaling": "Time over sequence length, one line per implementation",
}


def write_report(path: Path, sections: list[Section]) -> None:
    """Write the page, with the machine it was made on."""
    facts = about()
    intro = (
        f"Measured with kalman_attention {facts['kalman_attention']} and torch {facts['torch']} on "
        f"{facts['processor']}; page of {str(facts['date'])[:10]}. Figures in brackets are the "
        "paper's, everything else was measured here."
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_page("Kalman linear attention", intro, sections).encode())


def collect(root: Path) -> Iterator[Section]:
    """A section for every experiment and scale that has results."""
    for scale in SCALES:
        results = Results(root, scale)
        for name in EXPERIMENTS:
            yield from _experiment(load_experiment(name), scale, results)
        for name, caption in _FIGURES.items():
            images = sorted(results.folder(name).glob("*.svg"))
            for path in images:
                check_inside(path, root)
            if images:
                shown = [(path, f"{path.stem.replace('_', ' ')}. {caption}") for path in images]
                yield Section(title=f"{name}, scale {scale}", images=shown)


def _experiment(experiment: Experiment, scale: Scale, results: Results) -> Iterator[Section]:
    if not results.folder(experiment.name).is_dir():
        return
    cells = experiment.cells(scale)
    curves = results.folder(experiment.name) / "learning_curves.svg"
    for path in (curves, *(results.path(cell) for cell in cells)):
        check_inside(path, results.root)
    there = [r for c in cells if (r := results.load(c)) is not None]
    if not there:
        return
    try:
        tables = experiment.tables(scale, there)
    except (KeyError, IndexError, TypeError) as error:
        where = results.folder(experiment.name) / "cells"
        named = ", ".join(results.path(c).name for c in cells if results.path(c).is_file())
        raise ValueError(f"results in {where} lack what a table needs, {error}: {named}") from error
    source = f"In the paper: {experiment.source}" if experiment.source else "Not in the paper"
    shown = f"Learning curves: {experiment.metric.replace('_', ' ')} over updates"
    yield Section(
        title=f"{experiment.name}, scale {scale}",
        text=f"{EXPERIMENTS[experiment.name]}; {len(there)} of {len(cells)} cells. {source}.",
        tables=tables,
        images=[(curves, shown)] if curves.exists() else [],
    )


def check_inside(path: Path, root: Path) -> None:
    """Refuse a link that leads out of a folder: a page may be passed on, other files may not."""
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(root))
    if not real.is_relative_to(home):
        raise ValueError(
            f"{path} leads out of {root}, to {real}. A report shows only what is in its folder: "
            "copy it there, or remove the link."
        )
