"""``kla report``: one self-contained HTML page of results, or of pretraining runs."""

import argparse
from pathlib import Path

from kalman_attention.cli.paths import check_file, out_file

LEAD = (
    "Sequence mixing as exact Bayesian filtering, measured. Figures in brackets are the paper's, "
    "at its own scale; everything else comes from the runs in one folder of results."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "runs",
        type=Path,
        nargs="?",
        default=Path("runs/reproduce"),
        metavar="RUNS",
        help="folder of results, of pretraining runs, or of what kla compare wrote (default: "
        "runs/reproduce)",
    )
    parser.add_argument(
        "--out", type=out_file, metavar="FILE", help="page to write (default: RUNS/report.html)"
    )


def run(args: argparse.Namespace) -> int:
    """Collect what is there and write the page."""
    from kalman_attention.report.collect import collect, read_verdicts
    from kalman_attention.report.page import write_page

    sections = collect(args.runs)
    if not sections:
        raise ValueError(
            f"{args.runs} holds no results. Make some: kla reproduce mad --scale smoke"
        )
    path = args.out or check_file(args.runs / "report.html")
    write_page(path, LEAD, sections, read_verdicts(args.runs))
    print(f"report: {path}")
    return 0
