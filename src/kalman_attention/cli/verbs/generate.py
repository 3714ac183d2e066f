"""``kla generate``: continue a text from a checkpoint, and show how sure the model is."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kalman_attention._text import visible
from kalman_attention.cli import numbers
from kalman_attention.cli.parser import add_device, add_dtype, add_engine
from kalman_attention.cli.paths import RUNS
from kalman_attention.cli.terminal import paint, read_prompt

if TYPE_CHECKING:
    from kalman_attention.models.generation import TokenUncertainty

KINDS = {"entropy": 6.0, "aleatoric": 6.0, "epistemic": 1.0}
"""What can be shown, and from how many nats on it is shown as quite unsure."""

_LEVELS = ((64, 160, 255), (64, 200, 120), (220, 200, 60), (240, 140, 40), (235, 60, 60))
_LEVELS_256 = (75, 78, 185, 208, 203)
_RESET = "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        nargs="?",
        metavar="CHECKPOINT",
        help="folder with model and tokenizer (default: the newest pretraining run, and no prompt)",
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text to continue; - or none: standard input"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="where the tokenizer is (default: in CHECKPOINT)",
    )
    parser.add_argument(
        "--max-new-tokens", type=numbers.positive_int, default=200, help="where to stop"
    )
    parser.add_argument(
        "--temperature",
        type=numbers.nonnegative_float,
        default=0.8,
        help="0 takes the most likely token",
    )
    parser.add_argument(
        "--top-k",
        type=numbers.positive_int,
        metavar="K",
        help="only among the K most likely tokens (default: among all)",
    )
    parser.add_argument(
        "--top-p",
        type=numbers.probability,
        metavar="P",
        help="only among the most likely tokens that together reach this probability (default: "
        "among all)",
    )
    parser.add_argument(
        "--seed",
        type=numbers.seed,
        help="random seed; the same one gives the same text (default: a new one)",
    )
    parser.add_argument(
        "--num-samples",
        type=numbers.nonnegative_int,
        metavar="S",
        help="posterior samples (KLA+); 0 takes the mean (default: 0, and 10 for --uncertainty "
        "aleatoric or epistemic)",
    )
    parser.add_argument(
        "--uncertainty",
        nargs="?",
        const="entropy",
        choices=list(KINDS),
        help="colour every token by how unsure the model was of it, by entropy if nothing else is "
        "named (default: no colours)",
    )
    add_device(parser)
    add_dtype(parser)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation, token by token."""
    import torch

    from kalman_attention.evaluation.checkpoint import load_checkpoint, naming, newest_run
    from kalman_attention.models.generation import Sampling, stream

    if args.checkpoint is None:
        args.checkpoint, args.prompt = newest_run(RUNS), ""
    model, tokenizer = load_checkpoint(
        args.checkpoint, tokenizer=args.tokenizer, device=args.device
    )
    if args.dtype is not None:
        model.to(getattr(torch, args.dtype))
    prompt = read_prompt(args.prompt)
    ids = torch.tensor([[tokenizer.bos, *tokenizer.encode(prompt)]], device=args.device)
    generator = torch.Generator(args.device)
    generator.seed() if args.seed is None else generator.manual_seed(args.seed)
    steps = stream(
        model,
        ids,
        max_new_tokens=args.max_new_tokens,
        sampling=Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p),
        stop_token=tokenizer.bos,
        generator=generator,
        num_samples=_samples(args),
        output_uncertainty=args.uncertainty is not None,
    )
    marked = _marker(args.uncertainty)
    if args.uncertainty:
        paint(f"{legend(args.uncertainty, marked)}\n")
    print(prompt, end="", flush=True)
    text_of = tokenizer.stream()
    try:
        with naming(args.checkpoint):
            for step in steps:
                token = int(step.tokens)
                text = "" if token == tokenizer.bos else text_of(token)
                if text:  # part of a character waits for the rest of it
                    paint(marked(text, _value(step.uncertainty, args.uncertainty)))
    finally:
        print(flush=True)
    return 0


def _samples(args: argparse.Namespace) -> int:
    """Posterior samples; the parts of the uncertainty cannot be had without any."""
    if args.uncertainty in ("aleatoric", "epistemic"):
        if args.num_samples == 0:
            raise ValueError(f"--uncertainty {args.uncertainty} needs --num-samples 1 or more.")
        return args.num_samples or 10
    return args.num_samples or 0


def _value(found: "TokenUncertainty | None", kind: str | None) -> float | None:
    if found is None or kind is None:
        return None
    value = getattr(found, kind)
    assert value is not None
    return float(value)


Marker = Callable[[str, float | None], str]


def _marker(kind: str | None) -> Marker:
    """How tokens are marked: colours on a terminal that has them, numbers elsewhere.

    On a terminal the control characters of the text are written out; the colours are ours.
    """
    shown = visible if sys.stdout.isatty() else str
    if kind is None:
        return lambda text, value: shown(text)
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return lambda text, value: f"{shown(text)}{{{value:.1f}}}"
    full = os.environ.get("COLORTERM", "") in ("truecolor", "24bit")
    scale = KINDS[kind]

    def coloured(text: str, value: float | None) -> str:
        level = min(int((value or 0.0) / scale * len(_LEVELS)), len(_LEVELS) - 1)
        red, green, blue = _LEVELS[level]
        code = f"38;2;{red};{green};{blue}" if full else f"38;5;{_LEVELS_256[level]}"
        return f"\x1b[{code}m{shown(text)}{_RESET}"

    return coloured


def legend(kind: str, marked: Marker) -> str:
    """What the colours mean, in nats."""
    step = KINDS[kind] / len(_LEVELS)
    if marked("", 0.0) == "{0.0}":
        return f"{kind} of each token in nats, in braces after it"
    marks = [marked(f"{i * step:.1f}+", i * step + 1e-9) for i in range(len(_LEVELS))]
    return f"{kind} in nats: {' '.join(marks)}"
