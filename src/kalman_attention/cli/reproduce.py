"""``kla reproduce``: the paper's experiments, cell by cell, at three scales."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from kalman_attention.cli import figures
from kalman_attention.cli.table import render
from kalman_attention.cli.watch import Watch
from kalman_attention.recipes.cell import Cell, Results
from kalman_attention.recipes.experiment import SCALES, Experiment, Scale
from kalman_attention.recipes.registry import EXPERIMENTS
from kalman_attention.recipes.runner import run_cells
from kalman_attention.recipes.table import Table, markdown

FIGURES: dict[str, Callable[[Results, Scale], list[Path]]] = {
    "scaling": figures.scaling,
    "variance": figures.variance,
    "attention-maps": figures.maps,
}
"""Experiments that only look: at the speed of this machine, or into models that ``mad`` trained."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "experiment",
        choices=[*EXPERIMENTS, *FIGURES],
        help="; ".join(f"{e.name}: {e.summary}" for e in EXPERIMENTS.values()),
    )
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="cpu",
        help="smoke: seconds; cpu: hours on two cores; paper: as published (default: cpu)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument(
        "--only", action="append", metavar="LABELS", help="cells with these labels: kla/compression"
    )
    parser.add_argument("--list", action="store_true", help="list the cells and stop")
    parser.add_argument("--table", action="store_true", help="compute nothing, show what is there")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="where results go")


def run(args: argparse.Namespace) -> int:
    """Compute what is missing, then show tables and draw figures of what is there."""
    results = Results(args.out, args.scale)
    if args.experiment in FIGURES:
        for path in FIGURES[args.experiment](results, args.scale):
            print(path)
        return 0
    experiment = EXPERIMENTS[args.experiment]
    cells = experiment.cells(args.scale)
    chosen = [c for c in cells if args.only is None or any(c.matches(p) for p in args.only)]
    if not chosen:
        known = "\n  ".join(dict.fromkeys(c.name for c in cells))
        print(f"no cell has the labels {' or '.join(args.only)}. There are:\n  {known}")
        return 2
    if args.list:
        print("\n".join(f"{_mark(results, c)} {c.name}" for c in chosen))
        return 0
    if not args.table:
        print(f"{experiment.name} ({experiment.source}), scale {args.scale}: {len(chosen)} cells")
        watch = Watch(results)
        run_cells(chosen, results, jobs=args.jobs, say=watch.say, watch=watch)
    show(experiment, args.scale, results, cells)
    return 0


def show(experiment: Experiment, scale: Scale, results: Results, cells: Sequence[Cell]) -> None:
    """Print the tables of all results that are there, and write them beside the results."""
    there = [r for c in cells if (r := results.load(c)) is not None]
    tables = experiment.render(scale, there)
    for table in tables:
        print_table(table)
    folder = results.folder(experiment.name)
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(markdown(table) for table in tables)
    (folder / "tables.md").write_text(text, encoding="utf-8")
    for path in figures.curves(experiment, there, folder):
        print(path)


def print_table(table: Table) -> None:
    """A table for the terminal."""
    print(f"\n{table.title}\n")
    print(render(table.header, table.rows))
    for note in table.notes:
        print(f"- {note}")


def _mark(results: Results, cell: Cell) -> str:
    return "done" if results.path(cell).exists() else "    "
