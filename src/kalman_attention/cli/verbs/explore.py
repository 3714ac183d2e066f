"""``kla explore``: look inside a checkpoint on one interactive page, or live while typing."""

import argparse
from typing import TYPE_CHECKING, Any

from kalman_attention._files import write_atomically
from kalman_attention.cli import numbers
from kalman_attention.cli.arguments import (
    add_checkpoint,
    add_number,
    add_out_file,
    add_seed,
    open_checkpoint,
)
from kalman_attention.cli.terminal import read_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kalman_attention.models.language_model import LanguageModel

START = "Once upon a time there was a little filter that believed what it saw, but not too firmly."
"""The text of a live page before anything is typed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_checkpoint(parser, "folder with model and tokenizer; with --task, with a model")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "text", nargs="?", metavar="TEXT", help="text to show; - or nothing: standard input"
    )
    what.add_argument(
        "--task",
        metavar="NAME",
        help="a sequence of this task, for a model trained on it (default: a text)",
    )
    add_seed(parser, "with --task: random seed of the sequences")
    add_number(
        parser, "--index", numbers.nonnegative_int, "with --task: index of the sequence", default=0
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=N",
        help="with --task: an integer that differs from the published settings, such as "
        "seq_len=64 (default: none)",
    )
    add_number(
        parser, "--max-tokens", numbers.whole(1, 4096), "maximum tokens of a text", default=512
    )
    add_out_file(parser, "page to write", default="explore.html")
    parser.add_argument(
        "--serve", action="store_true", help="serve a live page on this machine, write no file"
    )
    add_number(
        parser,
        "--port",
        numbers.whole(0, 65535),
        "with --serve: port on 127.0.0.1; 0 picks a free one",
        default=8217,
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, or serve it until the user interrupts it."""
    from kalman_attention.evaluation.checkpoint import naming
    from kalman_attention.explorer.page import render

    with naming(args.checkpoint):
        if args.serve:
            return _serve(args)
        data = _task(args) if args.task else _reader(args)(read_prompt(args.text))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    page = render(data).encode()
    write_atomically(args.out, page)
    print(f"page: {args.out} ({len(page) / 1e6:.1f} MB); open it in a browser")
    return 0


def _reader(args: argparse.Namespace) -> "Callable[[str], dict[str, Any]]":
    """A function from a text to the data of the page."""
    from kalman_attention.explorer.look import look, text_subject

    model, tokenizer = open_checkpoint(args)
    title = args.checkpoint.resolve().name

    def read(text: str) -> dict[str, Any]:
        return look(model, text_subject(tokenizer, text, args.max_tokens), title=title)

    return read


def _task(args: argparse.Namespace) -> dict[str, Any]:
    from kalman_attention.explorer.look import look, task_subject
    from kalman_attention.models.storage import load_model
    from kalman_attention.tasks.registry import make_task

    task = make_task(args.task, **dict(_option(text) for text in args.option))
    model: LanguageModel = load_model(args.checkpoint, device=args.device).eval()
    if task.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"{args.task} has {task.vocab_size} tokens, the model in {args.checkpoint} has "
            f"{model.config.vocab_size}: it was trained on another task, or with other --option."
        )
    subject = task_subject(task, args.task, seed=args.seed, index=args.index)
    return look(model, subject, title=args.checkpoint.resolve().name)


def _option(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        return name, numbers.whole(0)(value)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--option is NAME=N: {error}.") from error


def _serve(args: argparse.Namespace) -> int:
    from kalman_attention.explorer.page import render
    from kalman_attention.explorer.server import ExplorerServer

    if args.task:
        raise ValueError("--serve shows what is typed: it takes a text, not --task.")
    read, text = _reader(args), START if args.text is None else read_prompt(args.text)
    page = render({**read(text), "text": text}, live=True)
    with ExplorerServer(page, read, args.port) as server:
        print(f"{server.url} (Ctrl-C ends it; only this machine can see it)", flush=True)
        server.serve_forever()
    return 0
