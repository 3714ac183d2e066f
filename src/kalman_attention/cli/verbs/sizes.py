"""``kla sizes``: parameters and state sizes of models, side by side."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kalman_attention._tables import render
from kalman_attention.cli.parser import listing
from kalman_attention.models.names import ALIASES, MODELS, SIZES

if TYPE_CHECKING:
    from kalman_attention import LanguageModelConfig

PAPER_TABLES = ("mad", "mqar")
MODEL_NAMES = "\n\n".join(
    (
        listing("models, each as MODEL-SIZE", MODELS),
        listing("sizes", SIZES),
        listing("short names", ALIASES),
    )
)
"""The names of all models, for help texts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = MODEL_NAMES
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "names",
        nargs="*",
        default=[],
        metavar="NAME",
        help="models such as kla-nano; all of them by default",
    )
    chosen.add_argument(
        "--paper",
        choices=PAPER_TABLES,
        help="the models of a table of the paper, with its state sizes and ours (default: presets)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    if args.paper is not None:
        print(f"one mixer, numbers per sequence; the paper's {args.paper} table and ours\n")
        print(paper_table(args.paper))
        return 0
    from kalman_attention.models.presets import PRESETS, preset

    chosen = {name: preset(name) for name in args.names} or PRESETS
    print("state, windows and growth per token: numbers per sequence, summed over blocks\n")
    print(size_table(chosen))
    return 0


def size_table(models: Mapping[str, "LanguageModelConfig"]) -> str:
    """A table of models: parameters, and the size of the state of a sequence.

    Args:
        models: maps the name to show to a configuration.
    """
    from kalman_attention.models.plan import format_plan
    from kalman_attention.models.sizes import model_size

    header = ["model", "plan", "d_model", "parameters", "of them vocabulary"]
    header += ["state per block", "state", "conv windows", "per token"]
    rows = []
    for name, config in models.items():
        size = model_size(config)
        each = sorted({mixer.state for mixer in size.mixers} - {0})
        cells = [name, format_plan(config.layers), str(config.d_model)]
        cells += [_count(size.parameters), _count(size.vocabulary)]
        cells += [" or ".join(map(_count, each)) or "-", _count(size.state)]
        rows.append([*cells, _count(size.window), _count(size.per_token)])
    return render(header, rows)


def paper_table(name: str) -> str:
    """The models of one of the paper's tables, as published and with matched state sizes.

    Args:
        name: name of the table, ``"mad"`` or ``"mqar"``.
    """
    from kalman_attention.models.matching import PAPER_MODELS
    from kalman_attention.models.sizes import mixer_size

    header = ["model", "blocks", "d_model", "variant", "parameters"]
    header += ["state", "printed", "conv window", "options"]
    rows = []
    for row in PAPER_MODELS[name]:
        pair = {"published": row.published, "matched": row.matched}
        if row.published == row.matched:
            pair = {"published = matched": row.published}
        for variant, options in pair.items():
            size = mixer_size(row.mixer, options)
            printed = "-" if variant == "matched" else _count(row.printed_state)
            cells = [row.name, str(row.blocks), str(options.d_model), variant]
            cells += [_count(size.parameters), _count(size.state), printed, _count(size.window)]
            rows.append([*cells, _describe(options)])
    return render(header, rows)


def _describe(options: object) -> str:
    """The options that determine the size of the state."""
    names = ("d_state", "expand", "num_heads", "expand_k", "expand_v", "proj_factor", "qk_factor")
    return ", ".join(f"{n}={getattr(options, n)}" for n in names if hasattr(options, n))


def _count(number: int) -> str:
    return f"{number:,}" if number else "-"
