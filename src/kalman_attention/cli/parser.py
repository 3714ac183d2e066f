"""The parser of all verbs: defaults in every help text, tables below it, and hints for typos."""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kalman_attention._text import nearest, visible


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Help texts that end with their default; the text below the options stays as it is."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        default = action.default
        silent = default is None or isinstance(default, bool) or default == argparse.SUPPRESS
        if text is None or silent or "(default" in text or not action.option_strings:
            return text
        if isinstance(default, (list, tuple)):
            return f"{text} (default: {' '.join(map(str, default))})"
        return f"{text} (default: %(default)s)"

    def add_argument(self, action: argparse.Action) -> None:
        """Take note of an argument and of the room that its name needs."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            # argparse forgets that verbs are indented, and breaks the line after the longest.
            self._action_max_length += self._indent_increment


class Parser(argparse.ArgumentParser):
    """An ``argparse.ArgumentParser`` of our own habits; options are not abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Formatter, "allow_abbrev": False, **options})

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        known = action.choices
        if known is None or value in known:
            return
        near = nearest(str(value), map(str, known))
        hint = f": did you mean {near!r}?" if near else "."
        every = ", ".join(map(str, known))
        raise argparse.ArgumentError(action, f"there is no {value!r}{hint} Choose from {every}")

    def error(self, message: str) -> NoReturn:
        """End with a message; the whole usage above it would only hide it."""
        end = "" if message.endswith("?") else "."
        self.exit(2, f"error: {message}{end} See `{self.prog} --help`.\n")

    def refuse_rest(self, rest: Sequence[str]) -> NoReturn:
        """End with an error about arguments that nothing takes."""
        option = next((word for word in rest if word.startswith("-")), None)
        if option is None:
            self.error(f"nothing takes the argument {rest[0]!r}")
        name = option.partition("=")[0]
        near = nearest(name, self._option_string_actions)
        self.error(f"there is no option {name}" + (f": did you mean {near}?" if near else ""))

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not None:
            file.write(visible(message) if file.isatty() else message)


def summary(doc: str | None) -> str:
    """What a verb does, from the first line of its module: all after the name."""
    text = (doc or "").split("\n", 1)[0].partition(": ")[2]
    return re.sub("`+", "`", text).removesuffix(".")


def listing(title: str, rows: Mapping[str, str]) -> str:
    """Names and what they mean, as a table below the options."""
    width = max(map(len, rows))
    lines = [f"  {name.ljust(width)}  {text}" for name, text in rows.items()]
    return "\n".join([f"{title}:", *lines])


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """The option ``--tokenizer``, for checkpoints that do not carry their own."""
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="where the tokenizer is (default: in CHECKPOINT)",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """The option ``--device``, which ``main`` checks."""
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """``--dtype``: what the weights are used in; the filter computes in float32 at least."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="type of the weights; the filter always calculates in float32 (default: as stored)",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The option ``--engine``, under which ``main`` runs the verb."""
    parser.add_argument(
        "--engine",
        dest="scan_engine",
        default="auto",
        metavar="NAME",
        help="what computes the scans of KLA layers; kla check lists the names",
    )
