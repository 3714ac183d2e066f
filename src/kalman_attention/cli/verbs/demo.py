"""``kla demo``: filter a signal, train KLA and Mamba for a minute, and write a page about it."""

import argparse

from kalman_attention.cli.paths import out_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "--out", type=out_folder, default="runs/demo", metavar="DIR", help="where everything goes"
    )


def run(args: argparse.Namespace) -> int:
    """Show everything and write the report."""
    from kalman_attention.cli.demonstration import demonstrate

    demonstrate(args.out)
    return 0
