"""``kla``: parse the command line and run the verb."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

import kalman_attention
from kalman_attention.cli import terminal
from kalman_attention.cli.parser import Parser, verb_summary
from kalman_attention.cli.paths import check_device, in_words
from kalman_attention.cli.verbs import (
    bench,
    check,
    compare,
    data,
    demo,
    explore,
    export,
    generate,
    pretrain,
    report,
    reproduce,
    score,
    sizes,
    task,
)
from kalman_attention.cli.verbs import eval as evaluate
from kalman_attention.recipes.machine import keep_memory

EXTRAS = {
    "datasets": "data",
    "jinja2": "report",
    "lm_eval": "eval",
    "matplotlib": "plot",
    "pyarrow": "data",
    "tokenizers": "data",
    "transformers": "hf",
}
"""The extra of this package that installs a library."""

VERBS = (
    *(check, demo, task, sizes, reproduce, report),
    *(data, pretrain, evaluate, score, explore, compare, generate, export, bench),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        with terminal.streams():
            code = _run(parse(argv))
            sys.stdout.flush()
            return code
    except BrokenPipeError:
        # The reader, such as head, has stopped; Python must not complain about it at exit.
        _forget_output()
        return 141  # 128 + SIGPIPE, as shells report it
    except KeyboardInterrupt:
        terminal.complain("interrupted")
        return 130  # 128 + SIGINT
    except (ValueError, OSError, MemoryError) as error:
        told = in_words(error) if isinstance(error, OSError) else str(error) or "out of memory."
        terminal.complain(f"error: {told}")
        with contextlib.suppress(OSError):
            if sys.stdout is not None:
                sys.stdout.flush()
            return 1
        _forget_output()
        return 1


def _run(args: argparse.Namespace) -> int:
    from kalman_attention.train.signals import ending_by_exception  # which needs torch

    keep_memory()
    if hasattr(args, "device"):
        check_device(args.device)
    try:
        with ending_by_exception(), _chosen_engine(args):
            code: int = args.verb(args)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS:
            raise
        raise ValueError(
            f"this needs {library}, which is not installed: pip install "
            f"'kalman_attention[{EXTRAS[library]}]'"
        ) from error
    except RuntimeError as error:
        # Torch raises a RuntimeError if it runs out of memory, on a CPU and on a GPU.
        if "can't allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError":
            raise MemoryError(f"not enough memory: {str(error).splitlines()[0]}") from error
        raise
    return code


def _chosen_engine(args: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Use the engine of ``--engine`` while the verb runs, if the verb has that option."""
    if not hasattr(args, "scan_engine"):
        return contextlib.nullcontext()
    from kalman_attention.ops.engines import use_engine

    return use_engine(args.scan_engine)


def _forget_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; exit with a message if it is wrong."""
    args, rest = build_parser().parse_known_args(argv)
    if rest:
        args.parser.refuse_rest(rest)
    return args


def build_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="kla",
        description="Kalman linear attention: check, demonstrate, train, evaluate, measure.",
        epilog="See kla VERB --help. Integers may have a suffix: 16k is 16,000 and 16Ki is 16,384; "
        "also M, B and Mi.",
    )
    version = f"kla {kalman_attention.__version__}"
    parser.add_argument(
        "--version", action="version", version=version, help="show the version and exit"
    )
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for verb in VERBS:
        name, text = verb.__name__.rpartition(".")[2], verb_summary(verb.__doc__)
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(verb=verb.run, parser=sub)
        verb.add_arguments(sub)
    return parser


if __name__ == "__main__":
    sys.exit(main())
