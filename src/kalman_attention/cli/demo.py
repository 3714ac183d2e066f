"""``kla demo``: filter a signal, train KLA and Mamba for a minute, and write a page about it."""

import argparse
from pathlib import Path

import torch

from kalman_attention.cli import figures
from kalman_attention.cli.demo_belief import show_belief
from kalman_attention.cli.measure import Shape, fastest, make_inputs, scan_pass
from kalman_attention.cli.page import Section
from kalman_attention.cli.report import write_report
from kalman_attention.cli.reproduce import print_table
from kalman_attention.cli.watch import Watch
from kalman_attention.ops.engines import ENGINES, REFERENCE
from kalman_attention.recipes.cell import Results
from kalman_attention.recipes.demo import EXPERIMENT
from kalman_attention.recipes.inspection import load_best
from kalman_attention.recipes.runner import run_cells
from kalman_attention.recipes.table import Table

_SHAPE = Shape(B=4, T=512, D=256, N=16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where everything goes")


def run(args: argparse.Namespace) -> int:
    """Show the filter, let it learn, time the engines, write the report."""
    out: Path = args.out
    print("1. The filter\n")
    belief = show_belief(out)
    print("\n2. Learning: copy the 4 tokens that matter out of 32, one block each\n")
    learning = _learn(Results(out, "cpu"))
    print("\n3. Speed of the engines here\n")
    speed = engine_speed()
    print_table(speed)
    sections = [
        Section(
            title="The filter",
            text="A signal seen through noise, and not at all in the middle: where no token "
            "brings evidence, the belief says that it does not know.",
            images=[(belief, "Signal, tokens seen, posterior mean and 95 % belief")]
            if belief
            else [],
        ),
        learning,
        Section(title="Speed", tables=[speed]),
    ]
    write_report(out / "report.html", sections)
    print(f"\nreport: {out / 'report.html'}")
    return 0


def _learn(results: Results) -> Section:
    cells = EXPERIMENT.cells("cpu")
    watch = Watch(results, period=10.0)
    found = run_cells(cells, results, jobs=len(cells), say=watch.say, watch=watch)
    tables = EXPERIMENT.tables("cpu", found)
    for table in tables:
        print_table(table)
    folder = results.folder(EXPERIMENT.name)
    images = [(p, "Accuracy over updates") for p in figures.curves(EXPERIMENT, found, folder)]
    trained = load_best(results, cells[:1])
    if images and trained is not None:
        caption = "Posterior variance of the trained KLA; lines mark the tokens to copy"
        images += [(p, caption) for p in figures.variance_of(trained, folder)]
    shown = [(path, caption) for path, caption in images if path.suffix == ".svg"]
    return Section(title="Learning", text=EXPERIMENT.summary, tables=tables, images=shown)


def engine_speed() -> Table:
    """Forward and backward of every usable engine, in one run."""
    cpu = torch.device("cpu")
    usable = [e.name for e in ENGINES.values() if e.why_not(cpu, torch.float32) is None]
    names = [REFERENCE, *usable]
    inputs = make_inputs(_SHAPE, grad=True)
    runs = {name: scan_pass(inputs, name, backward=True) for name in names}
    seconds = fastest(runs, seconds=6.0, most=10)
    rows = [
        [name, f"{1e3 * seconds[name]:.1f}", f"{seconds[REFERENCE] / seconds[name]:.1f} x"]
        for name in sorted(names, key=lambda name: seconds[name])
    ]
    notes = [f"{_SHAPE}, float32, {torch.get_num_threads()} threads, least of several passes"]
    header = ["engine", "forward + backward, ms", "against the loop in torch"]
    return Table("Engines", header, rows, notes)
