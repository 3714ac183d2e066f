"""``kla compare``: finished pretraining runs side by side: bits per byte, calibration, speed."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kalman_attention._files import write_atomically
from kalman_attention._progress import Progress
from kalman_attention._reading import read_json
from kalman_attention._tables import Table, render
from kalman_attention.cli import numbers
from kalman_attention.cli.arguments import add_folder, add_number, add_out_folder, add_threads
from kalman_attention.cli.verbs.eval import harness_module
from kalman_attention.evaluation.questions import checksum
from kalman_attention.recipes.machine import about
from kalman_attention.report.language import quality_table, repetitions, zero_shot_table

if TYPE_CHECKING:
    from kalman_attention.recipes.comparison import FinishedRun

_SPEED = "speed.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="folder of a run; runs that differ in their seeds only share a row, and the first of "
        "them answers the tasks",
    )
    add_folder(parser, "--shards", "the shards they were trained on (default: as recorded)")
    add_folder(parser, "--task-data", "local files of the zero-shot tasks (default: no tasks)")
    add_number(
        parser,
        "--limit",
        numbers.positive_int,
        "only the first N items of each task; the paper uses 500 (default: all)",
    )
    add_threads(parser)
    add_number(
        parser,
        "--seconds",
        numbers.nonnegative_float,
        "time for measuring the speed of all runs, which take turns; 0 skips it",
        default=60.0,
        metavar="S",
    )
    add_out_folder(
        parser,
        "folder for the results; runs that were measured before are not measured again",
        default="runs/compare",
    )


def run(args: argparse.Namespace) -> int:
    """Measure what is missing, print tables, write numbers and curves."""
    import torch

    from kalman_attention.plots.common import save_figure
    from kalman_attention.plots.training import plot_comparison
    from kalman_attention.recipes.comparison import check_comparable, open_run

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    opened = {folder.name: open_run(folder, args.shards) for folder in args.runs}
    if len(opened) < len(args.runs):
        raise ValueError("two of the runs are in folders of the same name: rename one of them.")
    check_comparable(list(opened.values()))
    asked = args.task_data and {"limit": args.limit, "questions": checksum(args.task_data)}
    args.out.mkdir(parents=True, exist_ok=True)
    groups = repetitions({name: found.recipe.to_dict() for name, found in opened.items()})
    first = [names[0] for names in groups]
    results = {
        name: _measured(args, name, found, asked if name in first else None)
        for name, found in opened.items()
    }
    speed = _speed(args, {name: opened[name] for name in first}) if args.seconds else {}
    _print(quality_table(results, speed))
    if not _can_calibrate():
        print("no ECE and AURC: pip install 'kalman_attention[score]'")
    if args.task_data is not None:
        print(f"\nzero-shot, in per cent; {_items(args.limit)}; paper: KLA paper, tab:lm-main\n")
        scored = [results[name] for name in first]
        tasks = {found["summary"]["model"]: found["zero_shot"]["tasks"] for found in scored}
        _print(zero_shot_table(tasks))
    curves = {
        name: [(point["tokens"], point["bits_per_byte"]) for point in results[name]["curve"]]
        for name in first
    }
    for path in save_figure(plot_comparison(curves), args.out / "curves.png"):
        print(path)
    return 0


def _measured(
    args: argparse.Namespace, name: str, found: "FinishedRun", asked: dict[str, Any] | None
) -> dict[str, Any]:
    """The result of a run, read from its file if that has the same weights and tasks."""
    from kalman_attention.recipes.comparison import measure, measure_calibration, weights_of

    path = args.out / f"{name}.json"
    known = read_json(path) if path.exists() else {}
    if known.get("weights") != weights_of(found):
        known = measure(found)
    if "calibration" not in known and _can_calibrate():
        known["calibration"] = measure_calibration(found)
    if asked is not None and known.get("zero_shot", {}).get("asked") != asked:
        known["zero_shot"] = {"asked": asked, **_zero_shot(args, found)}
    write_atomically(path, (json.dumps(known, indent=1) + "\n").encode())
    return known


def _can_calibrate() -> bool:
    """Whether the libraries are installed; the rest of the table does not need them."""
    from kalman_attention.evaluation.detection import require_libraries

    try:
        require_libraries()
    except ValueError:
        return False
    return True


def _zero_shot(args: argparse.Namespace, found: "FinishedRun") -> dict[str, Any]:
    from kalman_attention.evaluation.checkpoint import load_checkpoint, naming

    zero_shot = harness_module()
    model, tokenizer = load_checkpoint(found.folder)
    report = Progress(found.folder.name, None, "requests").update
    harness = zero_shot.HarnessModel(model, tokenizer, report=report)
    with naming(found.folder):
        scores: dict[str, Any] = zero_shot.evaluate_zero_shot(
            harness, data=args.task_data, limit=args.limit
        )
    return scores


def _speed(args: argparse.Namespace, opened: dict[str, "FinishedRun"]) -> dict[str, float]:
    """Tokens per second of training; runs take turns, so that all see the same machine."""
    from kalman_attention.benchmarks.measure import fastest
    from kalman_attention.recipes.comparison import training_passes

    # Limited by time, not by the number of rounds.
    least = fastest(training_passes(opened), seconds=args.seconds, most=1_000)
    found = {name: opened[name].recipe.batch_tokens / s for name, s in least.items()}
    data = {"tokens_per_second": found, "about": about()}
    write_atomically(args.out / _SPEED, (json.dumps(data, indent=1) + "\n").encode())
    return found


def _print(table: Table) -> None:
    print(render(table.header, table.rows))


def _items(limit: int | None) -> str:
    return "all items" if limit is None else f"the first {limit:,} items of each task"
