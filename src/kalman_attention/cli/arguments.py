"""Arguments that several verbs share: one declaration each, and what they stand for."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kalman_attention.cli import numbers
from kalman_attention.cli.paths import out_file, out_folder

if TYPE_CHECKING:
    from kalman_attention.evaluation.checkpoint import Checkpoint


def add_number(
    parser: Any,
    option: str,
    kind: Callable[[str], float],
    text: str,
    *,
    default: float | None = None,
    metavar: str = "N",
) -> None:
    """Add an option that takes a number.

    Args:
        parser: a parser or a group of one.
        option: name, with dashes.
        kind: reader of the number, from ``numbers``.
        text: help; if there is no default, it says what happens without the option.
        default: value without the option.
        metavar: placeholder in the help.
    """
    parser.add_argument(option, type=kind, default=default, metavar=metavar, help=text)


def add_folder(parser: Any, option: str, text: str) -> None:
    """Add an option that takes a folder to read; the help says what is read without it."""
    parser.add_argument(option, type=Path, metavar="DIR", help=text)


def add_out_folder(parser: Any, text: str, *, default: str | None = None) -> None:
    """Add ``--out`` for a folder, which is checked before any work."""
    parser.add_argument("--out", type=out_folder, default=default, metavar="DIR", help=text)


def add_out_file(parser: Any, text: str, *, default: str | None = None) -> None:
    """Add ``--out`` for a file, which is checked before any work."""
    parser.add_argument("--out", type=out_file, default=default, metavar="FILE", help=text)


def add_seed(parser: Any, text: str) -> None:
    """Add ``--seed``."""
    add_number(parser, "--seed", numbers.seed, text, default=0)


def add_threads(parser: Any) -> None:
    """Add ``--threads``."""
    text = "number of PyTorch threads (default: PyTorch's own)"
    add_number(parser, "--threads", numbers.workers, text)


def add_device(parser: Any) -> None:
    """Add ``--device``, which ``main`` checks."""
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps")


def add_engine(parser: Any) -> None:
    """Add ``--engine``; ``main`` runs the verb with it."""
    parser.add_argument(
        "--engine",
        dest="scan_engine",
        default="auto",
        metavar="NAME",
        help="engine for the scans of KLA layers; kla check lists the names",
    )


def add_checkpoint(
    parser: Any, text: str = "folder with model and tokenizer", *, optional: bool = False
) -> None:
    """Add CHECKPOINT, ``--tokenizer``, ``--device`` and ``--engine``; see ``open_checkpoint``.

    Args:
        parser: the parser.
        text: help of CHECKPOINT.
        optional: whether it may be left out.
    """
    nargs: dict[str, Any] = {"nargs": "?"} if optional else {}
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=text, **nargs)
    add_folder(parser, "--tokenizer", "folder of the tokenizer (default: CHECKPOINT)")
    add_device(parser)
    add_engine(parser)


def add_dtype(parser: Any) -> None:
    """Add ``--dtype``, the type of the weights; the filter computes in float32 at least."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="type of the weights; the filter always computes in float32 (default: as stored)",
    )


def add_samples(parser: Any, text: str = "posterior samples (KLA+); 0 uses the mean") -> None:
    """Add ``--num-samples`` and ``--seed``."""
    add_number(parser, "--num-samples", numbers.nonnegative_int, text, default=0, metavar="S")
    add_seed(parser, "random seed of the samples")


def open_checkpoint(args: argparse.Namespace) -> "Checkpoint":
    """Load the checkpoint, as the arguments of ``add_checkpoint`` and ``add_dtype`` say."""
    import torch

    from kalman_attention.evaluation.checkpoint import load_checkpoint

    found = load_checkpoint(args.checkpoint, tokenizer=args.tokenizer, device=args.device)
    dtype = getattr(args, "dtype", None)
    if dtype is not None:
        found.model.to(getattr(torch, dtype))
    return found
