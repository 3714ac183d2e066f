"""``kla pretrain``: train a language model on shards of tokens, by recipe."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kalman_attention._reading import read_json
from kalman_attention._tables import render
from kalman_attention.cli import numbers
from kalman_attention.cli.arguments import (
    add_device,
    add_engine,
    add_folder,
    add_number,
    add_out_folder,
)
from kalman_attention.cli.paths import DATA, RUNS, writable_folder
from kalman_attention.cli.verbs.sizes import MODEL_NAMES

if TYPE_CHECKING:
    from kalman_attention.parallel.ranks import Parallel
    from kalman_attention.recipes.pretrain import PretrainRecipe

_NUMBERS = {
    "tokens": (numbers.positive_int, "tokens to train on, such as 2M or 1.8B"),
    "batch_tokens": (numbers.positive_int, "tokens per update, such as 16Ki (16,384)"),
    "seq_len": (numbers.positive_int, "tokens per row"),
    "micro_batch": (numbers.positive_int, "rows per forward pass"),
    "num_samples": (numbers.positive_int, "posterior samples for --loss marginal"),
    "clip": (numbers.positive_float, "maximum norm of the gradients"),
    "warmup_steps": (numbers.nonnegative_int, "updates of linear warm-up"),
    "warmdown": (
        numbers.fraction,
        "fraction of the updates in which the learning rates decay, 0 to 1",
    ),
    "eval_every": (numbers.positive_int, "updates between evaluations"),
    "eval_tokens": (numbers.positive_int, "maximum number of validation tokens per evaluation"),
    "log_every": (numbers.positive_int, "updates between lines of metrics.jsonl"),
    "save_seconds": (numbers.positive_float, "seconds between checkpoints"),
    "threads": (numbers.workers, "number of PyTorch threads"),
    "seed": (numbers.seed, "random seed of the initial weights and the samples"),
}
_CHOICES = {
    "loader": (("packing", "window"), "rows that start with a document, or the text cut into rows"),
    "loss": (
        ("mean", "marginal"),
        "cross-entropy of the posterior mean, or marginal likelihood (KLA+)",
    ),
    "dtype": (("float32", "bfloat16"), "dtype of the computation"),
    "embedding_dtype": (("bfloat16", "float32"), "dtype of the stored token embedding"),
}
_FLAGS = {
    "reset_state": "reset the state at document boundaries",
    "gradient_checkpointing": "recompute blocks in the backward pass to save memory",
}
_RATES = {
    "lr": (numbers.positive_float, "base learning rate of matrices, head and vectors"),
    "embedding_lr": (numbers.nonnegative_float, "base learning rate of the embedding"),
    "weight_decay": (numbers.nonnegative_float, "weight decay of matrices and head"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = MODEL_NAMES
    parser.add_argument(
        "recipe", metavar="RECIPE", help="model to train: a name from the list below"
    )
    add_folder(parser, "--shards", f"output of kla data (default: {DATA})")
    add_out_folder(parser, f"folder of the run (default: {RUNS}/RECIPE)")
    add_folder(
        parser,
        "--init",
        "start from the weights in this run or model folder, with a new optimizer and schedule "
        "(default: random weights)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print sizes, learning rates, cost and memory, and exit",
    )
    add_device(parser)
    add_engine(parser)
    parser.add_argument(
        "--parallel",
        choices=("ddp", "fsdp"),
        help="train in the processes that torchrun starts (python -m kalman_attention), with the "
        "weights replicated (ddp) or sharded (fsdp) (default: one process)",
    )
    add_number(parser, "--context", numbers.workers, "processes per sequence", default=1)
    parser.add_argument("--tensorboard", action="store_true", help="also write for TensorBoard")
    parser.add_argument(
        "--wandb", action="store_true", help="also write for Weights & Biases (WANDB_MODE=offline)"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    group = parser.add_argument_group(
        "what differs from the recipe", "kla pretrain RECIPE --dry-run prints the defaults."
    )
    for name, (kind, text) in (*_NUMBERS.items(), *_RATES.items()):
        add_number(group, _option(name), kind, text, metavar="X")
    for name, (words, text) in _CHOICES.items():
        group.add_argument(_option(name), choices=words, help=text)
    for name, text in _FLAGS.items():
        group.add_argument(
            _option(name), action=argparse.BooleanOptionalAction, default=None, help=text
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(args: argparse.Namespace) -> int:
    """Print the plan, train, and print the result."""
    chosen = chosen_recipe(args)
    if args.dry_run:
        print(plan_table(chosen, args.shards))
        return 0
    if args.parallel is None:
        if args.context != 1:
            raise ValueError("--context needs --parallel ddp or fsdp, and torchrun.")
        return _train(args, chosen, None)
    from kalman_attention.parallel.ranks import from_environment

    with from_environment(args.parallel, context=args.context) as parallel:
        return _train(args, chosen, parallel)


def _train(args: argparse.Namespace, chosen: "PretrainRecipe", parallel: "Parallel | None") -> int:
    from kalman_attention.recipes.pretrain_run import SUMMARY, pretrain

    main = parallel is None or parallel.main
    shards, out = args.shards or DATA, args.out or writable_folder(RUNS / args.recipe)
    if main:
        print(f"{plan_table(chosen, shards)}\n\nshards: {shards}, run: {out}", flush=True)
    pretrain(
        chosen,
        shards,
        out,
        device=args.device if parallel is None else parallel.device,
        progress=main and not args.quiet,
        boards=[name for name in ("tensorboard", "wandb") if getattr(args, name)],
        command=shlex.join(["kla", *sys.argv[1:]]) if parallel is None else None,
        parallel=parallel,
        init=args.init,
    )
    if main:
        print(f"\n{summary_table(read_json(out / SUMMARY))}\n")
        for path in _draw(out, chosen):
            print(path)
        print(f"next: kla eval {out}\n      kla generate {out}")
    return 0


def chosen_recipe(args: argparse.Namespace) -> "PretrainRecipe":
    """The recipe with the changes of the command line."""
    from kalman_attention.recipes.pretrain import recipe
    from kalman_attention.train.optim import Rates

    names = (*_NUMBERS, *_CHOICES, *_FLAGS)
    changes: dict[str, Any] = {
        name: getattr(args, name) for name in names if getattr(args, name) is not None
    }
    rates: dict[str, Any] = {}
    if args.lr is not None:
        rates |= {"hidden": args.lr, "head": args.lr, "vector": args.lr}
    if args.embedding_lr is not None:
        rates["embedding"] = args.embedding_lr
    if args.weight_decay is not None:
        rates["weight_decay"] = args.weight_decay
    return recipe(args.recipe, **changes, **({"rates": Rates(**rates)} if rates else {}))


def plan_table(chosen: "PretrainRecipe", shards: Path | None) -> str:
    """The plan of a run, next to the paper's table.

    Args:
        chosen: the recipe.
        shards: folder of the training data; None if there is none yet.
    """
    from kalman_attention.data.shards import TRAIN, ShardedTokens
    from kalman_attention.recipes.pretrain_budget import budget_rows, make_budget

    if shards is None:
        plan = make_budget(chosen)
    else:
        index = ShardedTokens(shards).index
        plan = make_budget(
            chosen, vocab_size=index.vocab_size, train_tokens=index.total("tokens", TRAIN)
        )
    rows = budget_rows(plan)
    if all(row[2] == "-" for row in rows):
        return render(["plan", "this run"], [row[:2] for row in rows])
    return render(["plan", "this run", "paper (tab:lm-pretrain-hparams)"], rows)


def summary_table(found: dict[str, Any]) -> str:
    """The result of a run, in one row."""
    header = ["model", "parameters", "updates", "tokens", "val bits per byte", "best", "tokens/s"]
    cells = [found["model"], *(f"{found[n]:,}" for n in ("parameters", "steps", "tokens"))]
    cells += [f"{found['bits_per_byte']:.4f}", f"{found['best_bits_per_byte']:.4f}"]
    cells += [f"{found['tokens_per_second']:,.0f}", f"{found['hours']:.2f}"]
    return render([*header, "hours"], [cells])


def _draw(folder: Path, chosen: "PretrainRecipe") -> list[Path]:
    """Draw the learning curve, if matplotlib is installed."""
    from kalman_attention.train.metrics import read_metrics

    try:
        from kalman_attention.plots.common import save_figure
        from kalman_attention.plots.training import plot_pretraining
    except ModuleNotFoundError:
        print("no learning curve: pip install 'kalman_attention[plot]'")
        return []
    figure = plot_pretraining(read_metrics(folder), chosen.batch_tokens, title=chosen.model)
    return save_figure(figure, folder / "curve.png")
