"""``kla bench``: speed and memory on this machine, always as ratios within one run."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

from kalman_attention.benchmarks.options import (
    DecodeOptions,
    LayerOptions,
    MixerOptions,
    SweepOptions,
    TaskOptions,
)
from kalman_attention.cli import numbers
from kalman_attention.cli.arguments import add_device, add_number, add_out_folder, add_threads
from kalman_attention.cli.paths import BENCH
from kalman_attention.recipes.experiment import SCALES

Options = TypeVar("Options")

_MODEL = {"batch": "sequences", "width": "d_model", "state": "d_state of KLA"}


class Subject(NamedTuple):
    """Something to measure.

    Attributes:
        text: one line for the help.
        add_arguments: declares its options.
        run: measures, and returns the exit code.
    """

    text: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one sub-verb per subject."""
    subjects = parser.add_subparsers(title="subjects", required=True, metavar="SUBJECT")
    for name, subject in SUBJECTS.items():
        sub = subjects.add_parser(name, help=subject.text, description=subject.text)
        sub.set_defaults(subject=subject, parser=sub)
        subject.add_arguments(sub)


def run(args: argparse.Namespace) -> int:
    """Measure the chosen subject."""
    subject: Subject = args.subject
    return subject.run(args)


def _options(kind: type[Options], args: argparse.Namespace) -> Options:
    """The options of a benchmark, from the arguments of the same names."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: getattr(args, name) for name in names})


def _add_options(parser: Any, kind: type[object], texts: Mapping[str, str]) -> None:
    """Add one argument for each option in ``texts``; its default determines what it takes."""
    for name, text in texts.items():
        option, default = f"--{name.replace('_', '-')}", getattr(kind, name)
        if isinstance(default, float):
            add_number(parser, option, numbers.positive_float, text, default=default, metavar="S")
        elif isinstance(default, tuple):
            sizes: dict[str, Any] = {"type": numbers.positive_int, "nargs": "+", "metavar": "N"}
            parser.add_argument(option, **sizes, default=default, help=text)
        else:
            add_number(parser, option, numbers.positive_int, text, default=default)


def _rounds(per: str) -> dict[str, str]:
    return {
        "repeats": "maximum number of rounds",
        "seconds": f"approximate time for all rounds of a {per}",
    }


def _add_out(parser: argparse.ArgumentParser, default: str = BENCH) -> None:
    add_out_folder(parser, "folder for the results", default=default)


def _add_sweep(parser: argparse.ArgumentParser, out: str = BENCH) -> None:
    texts = {
        "lengths": "sequence lengths, T",
        "batch": "sequences, B",
        "channels": "channels, D",
        "slots": "slots, N",
        "patience": "skip an engine once a pass would take more than S seconds",
    }
    _add_options(parser, SweepOptions, texts)
    _add_out(parser, out)


def _add_scan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", choices=["goals", "sweep"], help="one of the two parts (default: both)"
    )
    add_device(parser)
    text = "engines of the sweep (default: all usable ones)"
    parser.add_argument("--engines", nargs="+", metavar="ENGINE", help=text)
    _add_sweep(parser)


def _run_scan(args: argparse.Namespace) -> int:
    import torch

    from kalman_attention.benchmarks.scan import bench_scan

    bench_scan(
        _options(SweepOptions, args),
        only=args.only,
        engines=args.engines,
        device=torch.device(args.device),
        out=args.out,
    )
    return 0


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    _add_sweep(parser, "runs/gpu-report")
    text = "without a GPU, report what needs none"
    parser.add_argument("--dry-run", action="store_true", help=text)


def _run_gpu(args: argparse.Namespace) -> int:
    from kalman_attention.benchmarks.gpu import report_gpu

    accurate = report_gpu(_options(SweepOptions, args), out=args.out, dry_run=args.dry_run)
    return 0 if accurate else 1


def _add_layer(parser: argparse.ArgumentParser) -> None:
    _add_options(parser, LayerOptions, {"lengths": "sequence lengths", **_MODEL})
    add_threads(parser)
    slow = "longest T for Mamba of transformers, which takes minutes beyond it on a CPU"
    _add_options(parser, LayerOptions, {**_rounds("length"), "mamba_up_to": slow})
    choices, text = ("stream", "project"), "source of the values"
    parser.add_argument("--value", choices=choices, default=LayerOptions.value, help=text)
    text = "rank of the projection to the precision (default: full)"
    _add_options(parser, LayerOptions, {"precision_rank": text})
    _add_out(parser)


def _run_layer(args: argparse.Namespace) -> int:
    from kalman_attention.benchmarks.layer import bench_layer

    bench_layer(_options(LayerOptions, args), out=args.out)
    return 0


def _add_mixers(parser: argparse.ArgumentParser) -> None:
    _add_options(parser, MixerOptions, {"lengths": "sequence lengths", **_MODEL})
    add_threads(parser)
    text = "mixers to measure (default: all)"
    parser.add_argument("--mixers", nargs="+", metavar="MIXER", help=text)
    text = "skip a mixer once a call would take more than S seconds"
    _add_options(parser, MixerOptions, {**_rounds("length"), "patience": text})
    rivals = parser.add_argument_group("public implementations on CPU, where installed")
    rivals.add_argument(
        "--rivals-at",
        type=numbers.positive_int,
        nargs="*",  # none: no comparison
        default=MixerOptions.rivals_at,
        metavar="T",
        help="sequence lengths",
    )
    texts = {
        "rivals_backward_up_to": "longest T with gradients; beyond it, some take minutes",
        "rival_repeats": "maximum number of rounds",
    }
    _add_options(rivals, MixerOptions, texts)
    _add_out(parser)


def _run_mixers(args: argparse.Namespace) -> int:
    from kalman_attention.benchmarks.mixers import bench_mixers

    bench_mixers(_options(MixerOptions, args), out=args.out)
    return 0


def _add_decode(parser: argparse.ArgumentParser) -> None:
    texts = {"contexts": "context lengths", "tokens": "tokens decoded per measurement", **_MODEL}
    _add_options(parser, DecodeOptions, texts)
    add_threads(parser)
    _add_options(parser, DecodeOptions, {"depth": "blocks"})
    text = "language model with random weights, compared with the time to read its weights"
    parser.add_argument("--preset", default=DecodeOptions.preset, metavar="NAME", help=text)
    seconds = "approximate time for all contexts; the preset takes a quarter of it in addition"
    texts = {**_rounds("context"), "seconds": seconds}
    _add_options(parser, DecodeOptions, texts)
    parser.add_argument("--no-plot", action="store_true", help="draw no figure")
    _add_out(parser)


def _run_decode(args: argparse.Namespace) -> int:
    from kalman_attention.benchmarks.decode import bench_decode

    bench_decode(_options(DecodeOptions, args), out=args.out, plot=not args.no_plot)
    return 0


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    text = "an experiment of kla reproduce on synthetic tasks"
    parser.add_argument(
        "experiment", nargs="?", default=TaskOptions.experiment, metavar="EXPERIMENT", help=text
    )
    text = "size of the experiment"
    parser.add_argument("--scale", choices=SCALES, default=TaskOptions.scale, help=text)
    text = "only runs with these labels, such as kla/compression (default: all)"
    parser.add_argument("--only", metavar="LABELS", help=text)
    _add_options(parser, TaskOptions, _rounds("task"))
    _add_out(parser)


def _run_tasks(args: argparse.Namespace) -> int:
    from kalman_attention.benchmarks.tasks import bench_tasks

    bench_tasks(_options(TaskOptions, args), out=args.out)
    return 0


def _add_roofline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")


def _run_roofline(args: argparse.Namespace) -> int:
    from kalman_attention.tools.roofline import predict

    print(predict(markdown=args.markdown))
    return 0


SUBJECTS = {
    "scan": Subject(
        "time of all engines over sequence length, forward and backward", _add_scan, _run_scan
    ),
    "layer": Subject(
        "the layer against its own matrix products, attention and Mamba", _add_layer, _run_layer
    ),
    "mixers": Subject(
        "all mixers at equal width and state, and public implementations on CPU",
        _add_mixers,
        _run_mixers,
    ),
    "decode": Subject(
        "time per decoded token over the length of the context", _add_decode, _run_decode
    ),
    "tasks": Subject(
        "one training update of every model of an experiment, and what its runs take",
        _add_tasks,
        _run_tasks,
    ),
    "gpu": Subject(
        "report on a GPU: accuracy, the paper's scaling figures, resources", _add_gpu, _run_gpu
    ),
    "roofline": Subject(
        "predicted speed of the Triton engine on two GPUs, from bytes and operations",
        _add_roofline,
        _run_roofline,
    ),
}
