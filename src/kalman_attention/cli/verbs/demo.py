"""``kla demo``: filter a signal, train KLA and Mamba for a minute, and write a page about it."""

import argparse

from kalman_attention.cli.arguments import add_out_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_out_folder(parser, "folder for the page and the models", default="runs/demo")


def run(args: argparse.Namespace) -> int:
    """Show everything and write the report."""
    from kalman_attention.cli.demonstration import demonstrate

    demonstrate(args.out)
    return 0
