"""``kla check``: which engines work here, which one ``auto`` picks, and how accurate they are."""

import argparse

from kalman_attention.cli.arguments import add_out_file
from kalman_attention.tools import ARCHITECTURES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--run",
        action="store_true",
        help="compare each usable engine with the float64 reference, values and gradients",
    )
    parser.add_argument("--engine", help="only this engine, with --run (default: all usable ones)")
    parser.add_argument(
        "--compile",
        nargs="*",
        metavar="ARCH",
        help="compile the GPU engines for these architectures, which needs no GPU (default: "
        f"{' '.join(ARCHITECTURES)})",
    )
    add_out_file(parser, "with --compile: also write its table as Markdown (default: print only)")


def run(args: argparse.Namespace) -> int:
    """List the engines, with ``--run`` also their errors; 1 if one violates the contract."""
    from kalman_attention.tools import engines

    if args.out is not None and args.compile is None:
        raise ValueError("--out writes the table of --compile: use both or neither.")
    if args.engine is not None and not args.run:
        raise ValueError("--engine selects what --run runs: use both or neither.")
    if args.compile is not None:
        return engines.show_resources(args.compile or ARCHITECTURES, args.out)
    engines.show_engines()
    return engines.run_engines(args.engine) if args.run else 0
