"""``kla eval``: score a checkpoint: the paper's zero-shot tasks, or bits per byte of a text."""

import argparse
import importlib
import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kalman_attention import published
from kalman_attention._progress import Progress
from kalman_attention._tables import render
from kalman_attention.cli import numbers
from kalman_attention.cli.arguments import (
    add_checkpoint,
    add_dtype,
    add_folder,
    add_number,
    add_out_file,
    add_samples,
    open_checkpoint,
)
from kalman_attention.cli.paths import RUNS, read_texts
from kalman_attention.evaluation.questions import BENCHMARKS
from kalman_attention.report.language import zero_shot_table

if TYPE_CHECKING:
    from kalman_attention.evaluation.checkpoint import Checkpoint
    from kalman_attention.evaluation.likelihood import TextScore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    where = "folder with model and tokenizer (default: the newest pretraining run)"
    add_checkpoint(parser, where, optional=True)
    add_dtype(parser)
    what = parser.add_argument_group("what to score")
    add_folder(
        what,
        "--shards",
        "validation split of the output of kla data, in bits per byte (default: the shards that "
        "the run was trained on)",
    )
    what.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="texts, in bits per byte (default: none)",
    )
    what.add_argument(
        "--tasks", nargs="*", metavar="TASK", help="zero-shot tasks (default: the paper's eight)"
    )
    add_folder(what, "--task-data", "local files of the tasks (default: fetched from the hub)")
    how = parser.add_argument_group("how to score")
    add_number(
        how,
        "--limit",
        numbers.positive_int,
        "only the first N items of each task, or documents; the paper uses 500 (default: all)",
    )
    how.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prepend start of text to the context of every task (default: yes)",
    )
    add_number(how, "--batch-size", numbers.positive_int, "sequences per batch", default=16)
    add_number(
        how, "--max-length", numbers.positive_int, "maximum length of the context", default=2048
    )
    add_number(
        how,
        "--stride",
        numbers.positive_int,
        "for bits per byte: independent windows of --max-length tokens, N tokens apart (default: "
        "one pass that carries the state)",
    )
    add_samples(how)
    add_out_file(parser, "write the result as JSON (default: print only)")


_MORE = """
The paper's eight zero-shot tasks need their data:
  kla eval {0} --task-data DIR    from local files (docs/evaluation.md says which)
  kla eval {0} --tasks            fetched from the hub"""


def run(args: argparse.Namespace) -> int:
    """Score, print, and write JSON if requested."""
    from kalman_attention.evaluation.checkpoint import naming, newest_run, trained_on

    if args.checkpoint is None:
        args.checkpoint = newest_run(RUNS)
    texts = read_texts(args.text or ())
    wants_tasks = args.tasks is not None or args.task_data is not None
    shards = None
    if not (wants_tasks or args.text or args.shards):
        args.shards = shards = trained_on(args.checkpoint)
        if shards is not None and not shards.is_dir():
            raise ValueError(
                f"{args.checkpoint} was trained on {shards}, which no longer exists. Give its "
                "new place with --shards, or score a text with --text."
            )
    found = open_checkpoint(args)
    with naming(args.checkpoint):
        result = _texts(args, found, texts) if args.text or args.shards else _tasks(args, found)
    result = {"checkpoint": str(args.checkpoint), **result}
    if shards is not None:
        print(_MORE.format(args.checkpoint))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten: {args.out}")
    return 0


def _tasks(args: argparse.Namespace, found: "Checkpoint") -> dict[str, Any]:
    zero_shot = harness_module()
    harness = zero_shot.HarnessModel(
        found.model,
        found.tokenizer,
        bos=args.bos,
        batch_size=args.batch_size,
        max_length=args.max_length,
        num_samples=args.num_samples,
        seed=args.seed,
        report=Progress("scoring", None, "requests").update,
    )
    result: dict[str, Any] = zero_shot.evaluate_zero_shot(
        harness, args.tasks or list(BENCHMARKS), data=args.task_data, limit=args.limit
    )
    settings = ", ".join(f"{name} {value}" for name, value in result["settings"].items())
    print(f"{args.checkpoint}: {settings}\n")
    print(score_table(result["tasks"]))
    if set(result["tasks"]) & set(BENCHMARKS):
        items = published.ZERO_SHOT_ITEMS
        print(f"\ncompared with the paper, in per cent (tab:lm-main, {items} items per task):\n")
        table = zero_shot_table({args.checkpoint.name: result["tasks"]})
        print(render(table.header, table.rows))
    return result


def harness_module() -> ModuleType:
    """The module for zero-shot tasks, which needs an extra."""
    try:
        return importlib.import_module("kalman_attention.evaluation.zero_shot")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"zero-shot tasks need lm-evaluation-harness ({error}): pip install "
            "'kalman_attention[eval]'"
        ) from error


def score_table(tasks: dict[str, dict[str, Any]]) -> str:
    """A table of all scores with their standard errors, in per cent."""

    def cell(scores: dict[str, Any], name: str) -> str:
        if name not in scores:
            return "-"
        error = scores.get(f"{name}_stderr")
        if not isinstance(error, float) or math.isnan(error):
            return f"{100 * scores[name]:.1f}"
        return f"{100 * scores[name]:.1f} +- {100 * error:.1f}"

    rows = [
        [name, str(s["items"]), cell(s, "acc"), cell(s, "acc_norm"), s["metric"] or "-"]
        for name, s in tasks.items()
    ]
    return render(["task", "items", "acc", "acc_norm", "in the paper"], rows)


def _texts(
    args: argparse.Namespace, found: "Checkpoint", texts: Mapping[str, str]
) -> dict[str, Any]:
    how = "carried" if args.stride is None else f"windows of {args.max_length} by {args.stride}"
    totals = {}
    if args.shards:
        totals[f"{args.shards} (validation)"] = _score_shards(args, found)
    for name, text in texts.items():
        totals[name] = _score(args, found, found.tokenizer.encode(text), len(text.encode()))
    rows = [
        [name, f"{s.bytes:,}", f"{s.tokens:,}", f"{s.bits_per_byte:.4f}", f"{s.perplexity:.2f}"]
        for name, s in totals.items()
    ]
    print(render(["text", "bytes", "tokens", "bits per byte", "perplexity per token"], rows))
    print(f"state: {how}; posterior samples: {args.num_samples}; start of text is not counted")
    settings = {"state": how, "num_samples": args.num_samples, "seed": args.seed}
    scores = {
        name: {
            "bits_per_byte": s.bits_per_byte,
            "nats": s.nats,
            "tokens": s.tokens,
            "bytes": s.bytes,
        }
        for name, s in totals.items()
    }
    return {"settings": settings, "texts": scores}


def _score(
    args: argparse.Namespace, found: "Checkpoint", tokens: list[int], size: int
) -> "TextScore":
    from kalman_attention.evaluation.likelihood import TextScore, document_nats

    nats = document_nats(
        found.model,
        found.tokenizer.bos,
        tokens,
        chunk=args.max_length,
        stride=args.stride,
        num_samples=args.num_samples,
        seed=args.seed,
    )
    return TextScore(nats=nats, tokens=len(tokens), bytes=size)


def _score_shards(args: argparse.Namespace, found: "Checkpoint") -> "TextScore":
    """Score every document of the validation split on its own."""
    from kalman_attention.data.shards import VALIDATION, ShardedTokens
    from kalman_attention.evaluation.likelihood import TextScore

    data = ShardedTokens(args.shards)
    data.check_tokenizer(found.tokenizer)
    total = TextScore(nats=0.0, tokens=0, bytes=0)
    progress = Progress("scoring", data.index.total("tokens", VALIDATION), "tokens")
    count = 0
    for shard in data.shards(VALIDATION):
        tokens, offsets = data.tokens(shard), data.offsets(shard).tolist()
        for begin, end in pairwise(offsets):
            if args.limit is not None and count == args.limit:
                break
            ids = tokens[begin + 1 : end].tolist()
            total += _score(args, found, ids, len(found.tokenizer.decode(ids).encode()))
            progress.update(total.tokens)
            count += 1
    progress.close()
    return total
