"""``kla generate``: continue a text from a checkpoint, and show how sure the model is."""

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

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
        help="folder with model and tokenizer (default: the newest pretraining run, and no prompt)",
    )
    parser.add_argument("prompt", nargs="?", help="text to continue; - or none: standard input")
    parser.add_argument("--tokenizer", type=Path, help="where the tokenizer is, if not there")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the most likely token")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, help="for the same text again")
    parser.add_argument("--samples", type=int, default=0, help="posterior samples (KLA+)")
    parser.add_argument(
        "--uncertainty",
        nargs="?",
        const="entropy",
        choices=list(KINDS),
        help="colour every token by how unsure the model was of it (default: entropy)",
    )
    parser.add_argument("--device", default="cpu")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation, token by token."""
    from kalman_attention.evaluation.checkpoint import load_checkpoint, naming, newest_run
    from kalman_attention.models.generation import Sampling, stream

    _check(args)
    if args.checkpoint is None:
        args.checkpoint, args.prompt = newest_run(), ""
    samples = args.samples or (10 if args.uncertainty in ("aleatoric", "epistemic") else 0)
    model, tokenizer = load_checkpoint(
        args.checkpoint, tokenizer=args.tokenizer, device=args.device
    )
    prompt = _prompt(args.prompt)
    ids = torch.tensor([[tokenizer.bos, *tokenizer.encode(prompt)]], device=args.device)
    generator = torch.Generator(args.device)
    generator.seed() if args.seed is None else generator.manual_seed(args.seed)
    steps = stream(
        model,
        ids,
        max_new_tokens=args.max_tokens,
        sampling=Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p),
        stop_token=tokenizer.bos,
        generator=generator,
        num_samples=samples,
        output_uncertainty=args.uncertainty is not None,
    )
    paint = _painter(args.uncertainty)
    if args.uncertainty:
        _say(f"{legend(args.uncertainty, paint)}\n")
    _say(prompt)
    text_of = tokenizer.stream()
    try:
        with naming(args.checkpoint):
            for step in steps:
                token = int(step.tokens)
                text = "" if token == tokenizer.bos else text_of(token)
                if text:  # part of a character waits for the rest of it
                    _say(paint(text, _value(step.uncertainty, args.uncertainty)))
    finally:
        _say("\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.temperature < 0.0 or not math.isfinite(args.temperature):
        raise ValueError(f"the temperature is at least 0, not {args.temperature}.")
    if args.top_k is not None and args.top_k < 1:
        raise ValueError(f"--top-k takes at least one token, not {args.top_k}.")
    if args.top_p is not None and not 0.0 < args.top_p <= 1.0:
        raise ValueError(f"--top-p is a probability above 0, not {args.top_p}.")


def _prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if sys.stdin.isatty():
        print("prompt (end with Ctrl-D):", file=sys.stderr)
    return sys.stdin.read().rstrip("\n")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _value(found: "TokenUncertainty | None", kind: str | None) -> float | None:
    if found is None or kind is None:
        return None
    value = getattr(found, kind)
    assert value is not None
    return float(value)


Painter = Callable[[str, float | None], str]


def _painter(kind: str | None) -> Painter:
    """How tokens are marked: colours on a terminal that has them, numbers elsewhere."""
    if kind is None:
        return lambda text, value: text
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return lambda text, value: f"{text}{{{value:.1f}}}"
    full = os.environ.get("COLORTERM", "") in ("truecolor", "24bit")
    scale = KINDS[kind]

    def paint(text: str, value: float | None) -> str:
        level = min(int((value or 0.0) / scale * len(_LEVELS)), len(_LEVELS) - 1)
        red, green, blue = _LEVELS[level]
        code = f"38;2;{red};{green};{blue}" if full else f"38;5;{_LEVELS_256[level]}"
        return f"\x1b[{code}m{text}{_RESET}"

    return paint


def legend(kind: str, paint: Painter) -> str:
    """What the colours mean, in nats."""
    step = KINDS[kind] / len(_LEVELS)
    if paint("", 0.0) == "{0.0}":
        return f"{kind} of each token in nats, in braces after it"
    marks = [paint(f"{i * step:.1f}+", i * step + 1e-9) for i in range(len(_LEVELS))]
    return f"{kind} in nats: {' '.join(marks)}"
