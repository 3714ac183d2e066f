"""``kla report``: one self-contained HTML page of results, or of pretraining runs."""

import argparse
from pathlib import Path

from kalman_attention.cli.arguments import add_out_file
from kalman_attention.cli.paths import writable_file

LEAD = (
    "Sequence mixing as exact Bayesian filtering, measured. Figures in brackets are the paper's, "
    "at its own scale; everything else comes from the runs in one folder of results."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "runs",
        type=Path,
        nargs="?",
        default=Path("runs/reproduce"),
        metavar="RUNS",
        help="folder with results, with pretraining runs, or with the output of kla compare "
        "(default: runs/reproduce)",
    )
    add_out_file(parser, "page to write (default: RUNS/report.html)")


def run(args: argparse.Namespace) -> int:
    """Collect the results and write the page."""
    from kalman_attention.report.collect import collect, read_verdicts
    from kalman_attention.report.page import write_page

    sections = collect(args.runs)
    if not sections:
        raise ValueError(
            f"{args.runs} contains no results. To make some: kla reproduce mad --scale smoke"
        )
    path = args.out or writable_file(args.runs / "report.html")
    write_page(path, LEAD, sections, read_verdicts(args.runs))
    print(f"report: {path}")
    return 0
