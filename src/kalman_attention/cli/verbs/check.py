"""``kla check``: which engines work here, which one ``auto`` picks, and whether they are right."""

import argparse

from kalman_attention.cli.paths import out_file
from kalman_attention.tools import ARCHITECTURES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "--run",
        action="store_true",
        help="run each usable engine against the float64 reference, values and gradients",
    )
    parser.add_argument("--engine", help="only this engine, with --run (default: all usable ones)")
    parser.add_argument(
        "--compile",
        nargs="*",
        metavar="ARCH",
        help="compile the GPU engines for these architectures, which needs no GPU (default: "
        f"{' '.join(ARCHITECTURES)})",
    )
    parser.add_argument(
        "--out",
        type=out_file,
        metavar="FILE",
        help="with --compile: write its table as Markdown, too (default: only print it)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the engines; with ``--run`` also their errors. 1 if an engine breaks the contract."""
    from kalman_attention.tools import engines

    if args.out is not None and args.compile is None:
        raise ValueError("--out is for the table of --compile: give both, or none.")
    if args.engine is not None and not args.run:
        raise ValueError("--engine says what --run runs: give both, or none.")
    if args.compile is not None:
        return engines.show_resources(args.compile or ARCHITECTURES, args.out)
    engines.show_engines()
    return engines.run_engines(args.engine) if args.run else 0
