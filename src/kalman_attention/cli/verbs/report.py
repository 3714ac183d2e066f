"""``kla report``: one self-contained HTML page of everything that ``kla reproduce`` found."""

import argparse
from pathlib import Path

from kalman_attention.cli.paths import check_file, out_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "runs",
        type=Path,
        nargs="?",
        default=Path("runs/reproduce"),
        metavar="RUNS",
        help="folder of results (default: runs/reproduce)",
    )
    parser.add_argument(
        "--out", type=out_file, metavar="FILE", help="page to write (default: RUNS/report.html)"
    )


def run(args: argparse.Namespace) -> int:
    """Collect what is there and write the page."""
    from kalman_attention.report.collect import collect, write_report

    sections = list(collect(args.runs))
    if not sections:
        raise ValueError(
            f"{args.runs} holds no results. Make some: kla reproduce mad --scale smoke"
        )
    path = args.out or check_file(args.runs / "report.html")
    write_report(path, sections)
    print(f"report: {path}")
    return 0
