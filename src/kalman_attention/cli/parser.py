"""The parser of all verbs: every help text shows its default, and typos get a suggestion."""

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from kalman_attention._text import nearest, visible


class Formatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that appends defaults, and leaves the text below the options as it is."""

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
        """Register an argument, and the width that its name needs."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            # argparse ignores that verbs are indented, and would wrap after the longest one.
            self._action_max_length += self._indent_increment


class Parser(argparse.ArgumentParser):
    """An ``argparse.ArgumentParser`` with short errors; options cannot be abbreviated."""

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
        """Exit with a message, without the usage, which would only hide it."""
        end = "" if message.endswith("?") else "."
        self.exit(2, f"error: {message}{end} See `{self.prog} --help`.\n")

    def refuse_rest(self, rest: Sequence[str]) -> NoReturn:
        """Exit with an error about arguments that are not known."""
        option = next((word for word in rest if word.startswith("-")), None)
        if option is None:
            self.error(f"nothing takes the argument {rest[0]!r}")
        name = option.partition("=")[0]
        near = nearest(name, self._option_string_actions)
        self.error(f"there is no option {name}" + (f": did you mean {near}?" if near else ""))

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not None:
            file.write(visible(message) if file.isatty() else message)


def verb_summary(doc: str | None) -> str:
    """What a verb does: the first line of its module's docstring, after the name."""
    text = (doc or "").split("\n", 1)[0].partition(": ")[2]
    return re.sub("`+", "`", text).removesuffix(".")


def listing(title: str, rows: Mapping[str, str]) -> str:
    """A table of names and their meaning, to be shown below the options."""
    width = max(map(len, rows))
    lines = [f"  {name.ljust(width)}  {text}" for name, text in rows.items()]
    return "\n".join([f"{title}:", *lines])
