"""``kla reproduce``: the paper's experiments, cell by cell, at three scales."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kalman_attention._tables import markdown, print_table
from kalman_attention.cli import numbers
from kalman_attention.cli.arguments import add_folder, add_number
from kalman_attention.cli.parser import listing
from kalman_attention.cli.paths import writable_folder
from kalman_attention.recipes.cell import Cell, Results
from kalman_attention.recipes.experiment import SCALES, Experiment, Scale
from kalman_attention.recipes.registry import EXPERIMENTS, load_experiment

FIGURES = {
    "scaling": "time of the engines over sequence length, on this machine",
    "variance": "posterior variance over a sequence, from a model trained by mad",
    "attention-maps": "Kalman attention maps, from models trained by mad",
}
"""Experiments that draw figures and train nothing."""
_TIMES = {"smoke": "seconds", "cpu": "hours on two cores", "paper": "as published, for a GPU"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        f"{listing('experiments', EXPERIMENTS | FIGURES)}\n\n{listing('scales', _TIMES)}"
    )
    parser.add_argument(
        "experiment",
        choices=[*EXPERIMENTS, *FIGURES],
        metavar="EXPERIMENT",
        help="a name from the list below",
    )
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="size of the experiment")
    add_number(parser, "--jobs", numbers.workers, "processes, with one thread each", default=1)
    parser.add_argument(
        "--only",
        action="append",
        metavar="LABELS",
        help="only cells with these labels, such as kla/compression (default: all cells)",
    )
    add_folder(
        parser,
        "--shards",
        "text for text-ladder and uncertainty, from kla data (default: none; for uncertainty, the "
        "source code of the standard library)",
    )
    add_folder(
        parser,
        "--domains",
        "other texts for uncertainty, one file each (default: documentation and code that every "
        "machine has)",
    )
    add_folder(
        parser,
        "--data",
        "measured series: sunspots.csv and a drive for series, set-a.tar.gz and Outcomes-a.txt for "
        "physionet, ETTh1.csv for forecasting (default: none)",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the cells, those with a result (done) and those whose result is of a different "
        "configuration (old), and exit",
    )
    parser.add_argument(
        "--table", action="store_true", help="show existing results without computing anything"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/reproduce"),
        metavar="DIR",
        help="folder of the results",
    )


def run(args: argparse.Namespace) -> int:
    """Compute what is missing, then print tables and draw figures of all results."""
    results = Results(args.out, args.scale)
    if not args.list:
        writable_folder(args.out)
    if args.experiment in FIGURES:
        for path in _look(args.experiment, results, args.scale):
            print(path)
        return 0
    experiment = load_experiment(args.experiment)
    cells = experiment.cells(args.scale)
    chosen = [c for c in cells if args.only is None or any(c.matches(p) for p in args.only)]
    if not chosen:
        known = "\n  ".join(dict.fromkeys(c.name for c in cells))
        raise ValueError(f"no cell has the labels {' or '.join(args.only)}. Cells:\n  {known}")
    if args.list:
        print("\n".join(f"{_mark(results, c)} {c.name}" for c in chosen))
        return 0
    places = _places(args)
    if not args.table:
        if experiment.prepare is not None and not places:
            folder = results.folder(experiment.name)
            folder.mkdir(parents=True, exist_ok=True)
            places = experiment.prepare(folder)
        chosen = [_placed(cell, places) for cell in chosen]
        from kalman_attention.cli.watch import CellProgress
        from kalman_attention.recipes.runner import run_cells

        source = experiment.source or "not in the paper"
        print(f"{experiment.name} ({source}), scale {args.scale}: {len(chosen)} cells")
        watch = CellProgress(results)
        run_cells(chosen, results, jobs=args.jobs, say=watch.say, watch=watch)
    show(experiment, args.scale, results, cells)
    if experiment.name == "series" and not args.table:
        from kalman_attention.report import figures

        print(*figures.series(chosen, results.folder("series")), sep="\n")
    return 0


def _look(name: str, results: Results, scale: Scale) -> list[Path]:
    """Draw the figures of an experiment in ``FIGURES``."""
    if name == "scaling":
        return _scaling(results, scale)
    from kalman_attention.report import figures

    draw = {"variance": figures.variance, "attention-maps": figures.attention_maps}
    return draw[name](results, scale)


def _scaling(results: Results, scale: Scale) -> list[Path]:
    """Time over sequence length, one line per implementation (``fig:scaling``)."""
    from kalman_attention.benchmarks import SweepOptions
    from kalman_attention.benchmarks.scan import bench_scan

    folder = results.folder("scaling")
    options = SweepOptions(lengths=(128, 256)) if scale == "smoke" else SweepOptions()
    bench_scan(options, only="sweep", out=folder)
    return sorted(folder.glob("*.png"))


def show(experiment: Experiment, scale: Scale, results: Results, cells: Sequence[Cell]) -> None:
    """Print the tables of all existing results, and write them next to the results."""
    from kalman_attention.report import figures

    there = [r for c in cells if (r := results.load(c)) is not None]
    tables = experiment.render(scale, there)
    for table in tables:
        print_table(table)
    folder = results.folder(experiment.name)
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(markdown(table) for table in tables)
    (folder / "tables.md").write_text(text, encoding="utf-8")
    drawn = figures.curves(experiment, there, folder)
    if experiment.name == "state-tracking":
        drawn += figures.state_tracking(there, scale, folder)
    for path in drawn:
        print(path)


def _places(args: argparse.Namespace) -> dict[str, str]:
    """The folders of data that the user gives, by name."""
    given = {name: getattr(args, name) for name in ("shards", "domains", "data")}
    return {name: str(path) for name, path in given.items() if path is not None}


def _placed(cell: Cell, places: dict[str, str]) -> Cell:
    """The same cell with the folders of its data."""
    for name in places:
        if not hasattr(cell.run, name):
            raise ValueError(
                f"--{name} does not apply to {cell.experiment}, which does not use it."
            )
    run: Any = dataclasses.replace(cell.run, **places)  # type: ignore[type-var]
    return dataclasses.replace(cell, run=run)


def _mark(results: Results, cell: Cell) -> str:
    """Whether there is a result, and whether it is one of this cell."""
    try:
        return "    " if results.load(cell) is None else "done"
    except ValueError:
        return "old "
