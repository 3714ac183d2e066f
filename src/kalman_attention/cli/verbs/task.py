"""``kla task``: list the synthetic tasks, and show their sequences."""

import argparse
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kalman_attention._tables import render
from kalman_attention.cli import numbers
from kalman_attention.cli.arguments import add_number, add_seed

if TYPE_CHECKING:
    from kalman_attention.tasks.task import Sequences, Task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add two sub-verbs."""
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    all_tasks = verbs.add_parser("list", help="all tasks: sizes, chance level, scored positions")
    all_tasks.set_defaults(task_verb=_list, parser=all_tasks)
    show = verbs.add_parser("show", help="one sequence, inputs above targets")
    show.add_argument("name", metavar="NAME", help="a task from kla task list")
    add_seed(show, "random seed of the set")
    show.add_argument("--split", choices=["train", "test"], default="test", help="which set")
    add_number(
        show, "--index", numbers.nonnegative_int, "index of the sequence in the set", default=0
    )
    show.add_argument("--short", action="store_true", help="a short version that fits on one line")
    show.set_defaults(task_verb=_show, parser=show)


def run(args: argparse.Namespace) -> int:
    """Run the sub-verb."""
    code: int = args.task_verb(args)
    return code


def _list(args: argparse.Namespace) -> int:
    from kalman_attention.tasks.registry import TASKS, make_task

    header = ["task", "vocab", "length", "train", "test", "chance", "scored in test"]
    print(render(header, [_row(name, make_task(name)) for name in TASKS]))
    return 0


def _row(name: str, task: "Task") -> list[str]:
    sizes = [task.vocab_size, task.input_len, task.size("train"), task.size("test")]
    return [name, *(f"{size:,}" for size in sizes), f"{100 * task.chance:.2f} %", task.scored]


def _show(args: argparse.Namespace) -> int:
    from kalman_attention.tasks.registry import make_task

    task = make_task(args.name)
    if args.short:
        task = make_task(args.name, **task.SHORT)
    if args.index >= task.size(args.split):
        raise ValueError(
            f"--index must be between 0 and {task.size(args.split) - 1}, got {args.index}."
        )
    found = task.generate(args.split, seed=args.seed, count=args.index + 1)
    print(picture(found, task.token_names(), row=args.index, width=_width()))
    return 0


def picture(found: "Sequences", names: Sequence[str], *, row: int, width: int) -> str:
    """One sequence as text, inputs above targets, wrapped at ``width``.

    Args:
        found: sequences of a task.
        names: names of its tokens.
        row: index of the sequence.
        width: maximum number of characters per line.

    Returns:
        Pairs of lines; ``_`` is a target that is not scored.
    """
    from kalman_attention.tasks.task import IGNORE

    inputs = [names[token] for token in found.inputs[row].tolist()]
    targets = ["_" if t == IGNORE else names[t] for t in found.targets[row].tolist()]
    cell = max(len(name) for name in (*inputs, *targets))
    per_line = max(1, (width - len("target")) // (cell + 1))
    lines = []
    for start in range(0, len(inputs), per_line):
        for title, tokens in (("input", inputs), ("target", targets)):
            cells = (token.rjust(cell) for token in tokens[start : start + per_line])
            lines.append(" ".join([title.ljust(6), *cells]))
        lines.append("")
    return "\n".join(lines[:-1])


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns
