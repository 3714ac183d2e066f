"""``kla bench``: speed and memory on this machine, always as ratios within one run."""

import argparse
import importlib
from typing import Any

from kalman_attention.benchmarks import BATCH, CHANNELS, LENGTHS, SLOTS
from kalman_attention.cli import numbers
from kalman_attention.cli.parser import add_device
from kalman_attention.cli.paths import BENCH, out_folder

SUBJECTS = {
    "scan": "the engines side by side, forward and backward, over sequence length",
    "layer": "the layer against its own matrix products, attention and Mamba",
    "mixers": "all mixers at equal width and state, and against public CPU versions",
    "decode": "time per decoded token against the length of the context",
    "gpu": "report of a GPU machine: accuracy, the paper's scaling figures, resources",
    "roofline": "what bytes and operations of the Triton engine allow on two GPUs",
}
"""What can be measured: a module of ``benchmarks`` each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One sub-verb per subject."""
    subjects = parser.add_subparsers(title="subjects", required=True, metavar="SUBJECT")
    for name, text in SUBJECTS.items():
        sub = subjects.add_parser(name, help=text, description=text)
        sub.set_defaults(subject=name, parser=sub)
        globals()[f"_add_{name}"](sub)


def run(args: argparse.Namespace) -> int:
    """Hand over to the subject."""
    module = importlib.import_module(f"kalman_attention.benchmarks.{args.subject}")
    code: int = module.run(args)
    return code


def _add_scan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=["goals", "sweep"], help="one of the two (default: both)")
    add_device(parser)
    parser.add_argument(
        "--engines", nargs="+", metavar="ENGINE", help="for the sweep (default: all usable ones)"
    )
    _add_sweep(parser, BENCH)


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    _add_sweep(parser, "runs/gpu-report")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: what needs none")


def _add_sweep(parser: argparse.ArgumentParser, out: str) -> None:
    _add_sizes(parser, "lengths", LENGTHS, "sequence lengths, T")
    _add_size(parser, "batch", BATCH, "sequences, B")
    _add_size(parser, "channels", CHANNELS, "channels, D")
    _add_size(parser, "slots", SLOTS, "slots, N")
    _add_seconds(parser, "patience", 20.0, "seconds of a pass before an engine gives up")
    _add_out(parser, out)


def _add_layer(parser: argparse.ArgumentParser) -> None:
    _add_sizes(parser, "lengths", [512, 1024, 2048, 4096, 8192, 16_384], "sequence lengths")
    _add_model(parser, width=960)
    _add_rounds(parser, repeats=10, seconds=20.0, per="length")
    _add_size(
        parser,
        "mamba-up-to",
        512,
        "longest T for transformers' Mamba, whose CPU path takes minutes beyond",
    )
    parser.add_argument(
        "--value", choices=("stream", "project"), default="stream", help="where values come from"
    )
    parser.add_argument(
        "--precision-rank",
        type=numbers.positive_int,
        metavar="N",
        help="rank of the precision's projection (default: full)",
    )
    _add_out(parser)


def _add_mixers(parser: argparse.ArgumentParser) -> None:
    _add_sizes(parser, "lengths", [512, 1024, 2048, 4096, 8192], "sequence lengths")
    _add_model(parser, width=512)
    parser.add_argument("--mixers", nargs="+", metavar="MIXER", help="which ones (default: all)")
    _add_rounds(parser, repeats=10, seconds=20.0, per="length")
    _add_seconds(parser, "patience", 60.0, "seconds of a call before a mixer gives up")
    rivals = parser.add_argument_group("public implementations on CPU, where installed")
    rivals.add_argument(
        "--rivals-at",
        type=numbers.positive_int,
        nargs="*",
        default=[512, 2048],
        metavar="T",
        help="sequence lengths",
    )
    _add_size(
        rivals,
        "rivals-backward-up-to",
        512,
        "longest T with gradients, which take some of them minutes beyond",
    )
    _add_size(rivals, "rival-repeats", 1, "rounds at most")
    _add_out(parser)


def _add_decode(parser: argparse.ArgumentParser) -> None:
    _add_sizes(parser, "contexts", [128, 512, 2048, 4096, 8192, 16_384], "context lengths")
    _add_size(parser, "tokens", 8, "tokens decoded per measurement")
    _add_model(parser, width=512)
    _add_size(parser, "depth", 4, "blocks")
    parser.add_argument(
        "--preset",
        default="kla-45m",
        metavar="NAME",
        help="language model, with random weights, whose time is compared with that of its bytes",
    )
    _add_rounds(parser, repeats=40, seconds=60.0, per="model and turn")
    parser.add_argument("--no-plot", action="store_true", help="numbers only")
    _add_out(parser)


def _add_roofline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")


def _add_model(parser: argparse.ArgumentParser, *, width: int) -> None:
    _add_size(parser, "batch", 1, "sequences")
    _add_size(parser, "width", width, "d_model")
    _add_size(parser, "state", 16, "d_state of KLA")
    parser.add_argument(
        "--threads", type=numbers.workers, metavar="N", help="threads of torch (default: torch's)"
    )


def _add_rounds(parser: argparse.ArgumentParser, *, repeats: int, seconds: float, per: str) -> None:
    _add_size(parser, "repeats", repeats, "rounds at most")
    _add_seconds(parser, "seconds", seconds, f"time for all rounds of a {per}, about")


def _add_size(parser: Any, name: str, default: int, text: str) -> None:
    kind = numbers.positive_int
    parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=text)


def _add_sizes(parser: Any, name: str, default: list[int], text: str) -> None:
    kind = numbers.positive_int
    parser.add_argument(f"--{name}", type=kind, nargs="+", default=default, metavar="N", help=text)


def _add_seconds(parser: Any, name: str, default: float, text: str) -> None:
    kind = numbers.positive_float
    parser.add_argument(f"--{name}", type=kind, default=default, metavar="S", help=text)


def _add_out(parser: argparse.ArgumentParser, default: str = BENCH) -> None:
    parser.add_argument(
        "--out", type=out_folder, default=default, metavar="DIR", help="folder for the results"
    )
