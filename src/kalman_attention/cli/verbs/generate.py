"""``kla generate``: continue a text from a checkpoint, and show how sure the model is."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kalman_attention._progress import Progress
from kalman_attention._text import visible
from kalman_attention.cli import numbers
from kalman_attention.cli.parser import add_device, add_dtype, add_engine, add_tokenizer
from kalman_attention.cli.paths import RUNS
from kalman_attention.cli.terminal import paint, read_prompt

if TYPE_CHECKING:
    from kalman_attention.models.generation import TokenUncertainty

KINDS = ("entropy", "aleatoric", "epistemic")
"""What can be shown, in nats; the last two are the parts of the first."""

# From blue to orange through grey, which every kind of colour vision tells apart.
_LEVELS = ((60, 140, 240), (110, 165, 215), (165, 165, 160), (215, 155, 70), (225, 120, 10))
_LEVELS_256 = (69, 110, 145, 179, 172)
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
    add_tokenizer(parser)
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
        choices=KINDS,
        help="colour every token by how unsure the model was of it, by entropy if nothing else is "
        "named; colours span the range of what is shown, so the text comes when it is finished. "
        "Knowing the last read-out would settle epistemic, not aleatoric (default: no colours)",
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
    screen = _screen(args.uncertainty, prompt, args.max_new_tokens)
    text_of = tokenizer.stream()
    try:
        with naming(args.checkpoint):
            for step in steps:
                token = int(step.tokens)
                text = "" if token == tokenizer.bos else text_of(token)
                if text:  # part of a character waits for the rest of it
                    screen.show(text, _value(step.uncertainty, args.uncertainty))
    finally:
        screen.finish()
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


def _screen(kind: str | None, prompt: str, most: int) -> "Plain | Coloured":
    """How tokens are shown: in colours on a terminal that has them, with numbers elsewhere."""
    if kind is None or not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return Plain(kind, prompt)
    return Coloured(kind, prompt, most)


class Plain:
    """Shows every token at once; with its uncertainty in braces after it, if that is wanted.

    Args:
        kind: what is shown of the uncertainty, if anything.
        prompt: what stands before the tokens.
    """

    def __init__(self, kind: str | None, prompt: str) -> None:
        if kind is not None:
            paint(f"{kind} of each token in nats, in braces after it\n")
        print(prompt, end="", flush=True)

    def show(self, text: str, value: float | None) -> None:
        """Show one token."""
        paint(_harmless(text) if value is None else f"{_harmless(text)}{{{value:.3g}}}")

    def finish(self) -> None:
        """End the line."""
        print(flush=True)


class Coloured:
    """Shows all tokens at the end: only then is the range known over which colours are spread.

    Args:
        kind: what is shown of the uncertainty.
        prompt: what stands before the tokens.
        most: tokens that will come, at most.
    """

    def __init__(self, kind: str, prompt: str, most: int) -> None:
        self.kind, self.prompt = kind, prompt
        self.tokens: list[tuple[str, float]] = []
        self.progress = Progress("generating", most, "tokens")

    def show(self, text: str, value: float | None) -> None:
        """Keep one token."""
        self.tokens.append((text, value or 0.0))
        self.progress.update(len(self.tokens))

    def finish(self) -> None:
        """Show what there is, also after an interruption."""
        self.progress.close()
        values = [value for _, value in self.tokens] or [0.0]
        low, high = min(values), max(values)
        paint(f"{self._legend(low, high)}\n{_harmless(self.prompt)}")
        for text, value in self.tokens:
            paint(_colour(_harmless(text), _level(value, low, high)))
        print(flush=True)

    def _legend(self, low: float, high: float) -> str:
        """What the colours mean: from where on each of them is used."""
        count = len(_LEVELS)
        starts = [low + i * (high - low) / count for i in range(count)]
        marks = " ".join(_colour(f"{start:.3g}+", i) for i, start in enumerate(starts))
        return f"{self.kind} in nats, from least to most here: {marks} (up to {high:.3g})"


def _harmless(text: str) -> str:
    """On a terminal the control characters of the text are written out; the colours are ours."""
    return visible(text) if sys.stdout.isatty() else text


def _level(value: float, low: float, high: float) -> int:
    share = (value - low) / (high - low) if high > low else 0.0
    return min(int(share * len(_LEVELS)), len(_LEVELS) - 1)


def _colour(text: str, level: int) -> str:
    full = os.environ.get("COLORTERM", "") in ("truecolor", "24bit")
    red, green, blue = _LEVELS[level]
    code = f"38;2;{red};{green};{blue}" if full else f"38;5;{_LEVELS_256[level]}"
    return f"\x1b[{code}m{text}{_RESET}"
