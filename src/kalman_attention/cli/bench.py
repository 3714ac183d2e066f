"""``kla bench``: speed and memory on this machine, always as ratios within one run."""

import argparse

from kalman_attention.cli import (
    bench_decode,
    bench_gpu,
    bench_layer,
    bench_mixers,
    bench_roofline,
    bench_scan,
)

SUBJECTS = {
    "scan": bench_scan,
    "layer": bench_layer,
    "mixers": bench_mixers,
    "decode": bench_decode,
    "gpu": bench_gpu,
    "roofline": bench_roofline,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-verb per subject."""
    subjects = parser.add_subparsers(title="subjects", required=True, metavar="SUBJECT")
    for name, module in SUBJECTS.items():
        summary = (module.__doc__ or "").split("\n", 1)[0].partition(": ")[2]
        sub = subjects.add_parser(name, help=summary, description=summary)
        module.add_arguments(sub)
        sub.set_defaults(subject=module.run)


def run(args: argparse.Namespace) -> int:
    """Hand over to the subject."""
    code: int = args.subject(args)
    return code
