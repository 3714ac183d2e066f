"""``kla generate``: continue a text from a checkpoint, and show how sure the model is."""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from kalman_attention._progress import Progress
from kalman_attention._text import visible
from kalman_attention.cli import numbers
from kalman_attention.cli.arguments import add_checkpoint, add_dtype, add_number, open_checkpoint
from kalman_attention.cli.paths import RUNS
from kalman_attention.cli.terminal import paint, read_prompt

if TYPE_CHECKING:
    from kalman_attention.models.generation import TokenUncertainty

KINDS = ("entropy", "aleatoric", "epistemic")
"""Kinds of uncertainty, in nats; the last two add up to the first."""

# From blue through grey to orange, which can be told apart with any colour vision.
_LEVELS = ((60, 140, 240), (110, 165, 215), (165, 165, 160), (215, 155, 70), (225, 120, 10))
_LEVELS_256 = (69, 110, 145, 179, 172)
_RESET = "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    where = "folder with model and tokenizer (default: the newest pretraining run, and no prompt)"
    add_checkpoint(parser, where, optional=True)
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="text to continue; - or nothing: standard input"
    )
    add_number(
        parser,
        "--max-new-tokens",
        numbers.positive_int,
        "maximum number of new tokens",
        default=200,
    )
    add_number(
        parser,
        "--temperature",
        numbers.nonnegative_float,
        "0 always takes the most likely token",
        default=0.8,
        metavar="X",
    )
    add_number(
        parser,
        "--top-k",
        numbers.positive_int,
        "sample from the K most likely tokens (default: from all)",
        metavar="K",
    )
    add_number(
        parser,
        "--top-p",
        numbers.probability,
        "sample from the most likely tokens whose total probability reaches P (default: from all)",
        metavar="P",
    )
    add_number(
        parser,
        "--seed",
        numbers.seed,
        "random seed; the same seed gives the same text (default: a new one)",
    )
    add_number(
        parser,
        "--num-samples",
        numbers.nonnegative_int,
        "posterior samples (KLA+); 0 uses the mean (default: 0, or 10 for --uncertainty aleatoric "
        "and epistemic)",
        metavar="S",
    )
    parser.add_argument(
        "--uncertainty",
        nargs="?",
        const="entropy",
        choices=KINDS,
        help="colour every token by the uncertainty of the model, by default its entropy; the "
        "colours span the range in the text, so it appears when it is complete. Knowing the last "
        "read-out would remove the epistemic part, not the aleatoric (default: no colours)",
    )
    add_dtype(parser)


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation, token by token."""
    import torch

    from kalman_attention.evaluation.checkpoint import naming, newest_run
    from kalman_attention.models.generation import Sampling, stream

    if args.checkpoint is None:
        args.checkpoint, args.prompt = newest_run(RUNS), ""
    model, tokenizer = open_checkpoint(args)
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
                if text:  # an incomplete character waits for its other bytes
                    screen.show(text, _value(step.uncertainty, args.uncertainty))
    finally:
        screen.finish()
    return 0


def _samples(args: argparse.Namespace) -> int:
    """Number of posterior samples; the parts of the uncertainty need at least one."""
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
    """How to show tokens: in colours on a terminal that has them, with numbers elsewhere."""
    if kind is None or not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return Plain(kind, prompt)
    return Coloured(kind, prompt, most)


class Plain:
    """Shows each token immediately, followed by its uncertainty in braces if requested.

    Args:
        kind: kind of uncertainty to show, if any.
        prompt: text before the tokens.
    """

    def __init__(self, kind: str | None, prompt: str) -> None:
        if kind is not None:
            paint(f"{kind} of each token in nats, in braces after the token\n")
        print(prompt, end="", flush=True)

    def show(self, text: str, value: float | None) -> None:
        """Show one token."""
        paint(_harmless(text) if value is None else f"{_harmless(text)}{{{value:.3g}}}")

    def finish(self) -> None:
        """End the line."""
        print(flush=True)


class Coloured:
    """Shows all tokens at the end, when the range that the colours span is known.

    Args:
        kind: kind of uncertainty to show.
        prompt: text before the tokens.
        most: maximum number of tokens.
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
        """Show the tokens so far, also after an interruption."""
        self.progress.close()
        values = [value for _, value in self.tokens] or [0.0]
        low, high = min(values), max(values)
        paint(f"{self._legend(low, high)}\n{_harmless(self.prompt)}")
        for text, value in self.tokens:
            paint(_colour(_harmless(text), _level(value, low, high)))
        print(flush=True)

    def _legend(self, low: float, high: float) -> str:
        """The meaning of the colours: the value at which each begins."""
        count = len(_LEVELS)
        starts = [low + i * (high - low) / count for i in range(count)]
        marks = " ".join(_colour(f"{start:.3g}+", i) for i, start in enumerate(starts))
        return f"{self.kind} in nats, from lowest to highest: {marks} (up to {high:.3g})"


def _harmless(text: str) -> str:
    """Escape control characters of the text on a terminal; only our colours get through."""
    return visible(text) if sys.stdout.isatty() else text


def _level(value: float, low: float, high: float) -> int:
    share = (value - low) / (high - low) if high > low else 0.0
    return min(int(share * len(_LEVELS)), len(_LEVELS) - 1)


def _colour(text: str, level: int) -> str:
    full = os.environ.get("COLORTERM", "") in ("truecolor", "24bit")
    red, green, blue = _LEVELS[level]
    code = f"38;2;{red};{green};{blue}" if full else f"38;5;{_LEVELS_256[level]}"
    return f"\x1b[{code}m{text}{_RESET}"
