"""``kla``: parse the verb, hand over to its file."""

import argparse
import os
import sys
from collections.abc import Sequence

from kalman_attention.cli import (
    bench,
    check,
    compare,
    data,
    demo,
    generate,
    pretrain,
    report,
    reproduce,
    sizes,
    task,
)
from kalman_attention.cli import eval as evaluate
from kalman_attention.recipes.machine import keep_memory
from kalman_attention.train.signals import ending_by_exception


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    args = build_parser().parse_args(argv)
    keep_memory()
    try:
        with ending_by_exception():
            code: int = args.verb(args)
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as head, has seen enough; nor must Python complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="kla",
        description="Kalman linear attention: check, demonstrate, train, evaluate, measure.",
    )
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for verb in (
        check,
        demo,
        task,
        sizes,
        reproduce,
        report,
        data,
        pretrain,
        evaluate,
        compare,
        generate,
        bench,
    ):
        name = verb.__name__.rpartition(".")[2]
        doc = (verb.__doc__ or "").split("\n", 1)[0]
        summary = doc.partition(": ")[2]
        sub = verbs.add_parser(name, help=summary, description=summary)
        verb.add_arguments(sub)
        sub.set_defaults(verb=verb.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
