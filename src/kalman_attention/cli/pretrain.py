"""``kla pretrain``: train a language model on shards of tokens, by recipe."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kalman_attention.cli.table import render
from kalman_attention.evaluation.checkpoint import RUNS
from kalman_attention.reading import read_json
from kalman_attention.recipes.pretrain import RECIPES, PretrainRecipe, recipe
from kalman_attention.train.optim import Rates

if TYPE_CHECKING:
    from kalman_attention.parallel.ranks import Parallel

DATA = Path("runs/data")
"""Where ``kla data`` writes unless told otherwise."""

_PLAIN = {
    "tokens": "tokens to train on, such as 2M or 1.8B",
    "batch_tokens": "tokens per update, such as 16k (16,384)",
    "seq_len": "tokens of a row",
    "micro_batch": "rows that go through the model at a time",
    "num_samples": "posterior samples of --loss marginal",
    "clip": "largest norm of the gradients",
    "warmup_steps": "updates of linear warm-up",
    "warmdown": "part of the updates in which the rates fall",
    "eval_every": "updates between evaluations",
    "eval_tokens": "validation tokens scored each time, at most",
    "log_every": "updates between lines of metrics.jsonl",
    "save_seconds": "seconds between checkpoints",
    "threads": "threads of torch",
    "seed": "of the first weights and of samples",
}
_CHOICES = {
    "loader": ("packing", "window"),
    "loss": ("mean", "marginal"),
    "dtype": ("float32", "bfloat16"),
    "embedding_dtype": ("bfloat16", "float32"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help=f"one of {', '.join(RECIPES)}; nano takes minutes on two cores, micro an hour, 45m "
        "and 180m are the paper's",
    )
    parser.add_argument("--data", type=Path, help=f"what kla data wrote (default: {DATA})")
    parser.add_argument("--out", type=Path, help=f"folder of the run (default: {RUNS}/RECIPE)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--parallel",
        choices=("ddp", "fsdp"),
        help="train with the processes that torchrun started (python -m kalman_attention), with "
        "weights whole on each or spread over all",
    )
    parser.add_argument("--context", type=int, default=1, help="processes that share a sequence")
    parser.add_argument("--tensorboard", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    changed = parser.add_argument_group("what differs from the recipe")
    for name, text in _PLAIN.items():
        kind = {"clip": float, "warmdown": float, "save_seconds": float}.get(name, count)
        changed.add_argument(f"--{name.replace('_', '-')}", type=_reader(name, kind), help=text)
    for name, words in _CHOICES.items():
        changed.add_argument(f"--{name.replace('_', '-')}", choices=words)
    flags = {
        "reset_state": "forget at the borders of documents",
        "gradient_checkpointing": "compute blocks twice, store less",
    }
    for name, text in flags.items():
        changed.add_argument(
            f"--{name.replace('_', '-')}",
            action=argparse.BooleanOptionalAction,
            default=None,
            help=text,
        )
    changed.add_argument("--lr", type=float, help="base rate of matrices, head and vectors")
    changed.add_argument("--embedding-lr", type=float, help="base rate of the embedding")
    changed.add_argument("--weight-decay", type=float)


def run(args: argparse.Namespace) -> int:
    """Print the plan, train, and print what came out."""
    chosen = chosen_recipe(args)
    if args.dry_run:
        print(plan_table(chosen, args.data))
        return 0
    if args.parallel is None:
        if args.context != 1:
            raise ValueError("--context needs --parallel ddp or fsdp, and torchrun.")
        return _train(args, chosen, None)
    from kalman_attention.parallel.ranks import from_environment

    with from_environment(args.parallel, context=args.context) as parallel:
        return _train(args, chosen, parallel)


def _train(args: argparse.Namespace, chosen: PretrainRecipe, parallel: "Parallel | None") -> int:
    from kalman_attention.recipes.pretrain_run import SUMMARY, pretrain

    main = parallel is None or parallel.main
    data, out = args.data or DATA, args.out or RUNS / args.recipe
    if main:
        print(f"{plan_table(chosen, data)}\n\ndata: {data}, run: {out}", flush=True)
    pretrain(
        chosen,
        data,
        out,
        device=args.device if parallel is None else parallel.device,
        progress=main and not args.quiet,
        tensorboard=args.tensorboard,
        command=shlex.join(["kla", *sys.argv[1:]]) if parallel is None else None,
        parallel=parallel,
    )
    if main:
        print(f"\n{summary_table(read_json(out / SUMMARY))}\n")
        for path in _draw(out, chosen):
            print(path)
        print(f"next: kla eval {out}\n      kla generate {out}")
    return 0


def chosen_recipe(args: argparse.Namespace) -> PretrainRecipe:
    """The recipe, with what the command line changes."""
    names = (*_PLAIN, *_CHOICES, "reset_state", "gradient_checkpointing")
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


def plan_table(chosen: PretrainRecipe, data: Path | None) -> str:
    """The plan beside the paper's table.

    Args:
        chosen: the run.
        data: its shards; None if there are none yet.
    """
    try:
        from kalman_attention.data.shards import TRAIN, ShardedTokens
        from kalman_attention.recipes.pretrain_plan import make_plan, plan_rows
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: pip install 'kalman_attention[data]'") from error

    if data is None:
        plan = make_plan(chosen)
    else:
        index = ShardedTokens(data).index
        plan = make_plan(
            chosen, vocab_size=index.vocab_size, train_tokens=index.total("tokens", TRAIN)
        )
    rows = plan_rows(plan)
    if all(row[2] == "-" for row in rows):
        return render(["plan", "this run"], [row[:2] for row in rows])
    return render(["plan", "this run", "paper (tab:lm-pretrain-hparams)"], rows)


def summary_table(found: dict[str, Any]) -> str:
    """What a run has reached, in one row."""
    header = ["model", "parameters", "updates", "tokens", "val bits per byte", "best", "tokens/s"]
    cells = [found["model"], *(f"{found[n]:,}" for n in ("parameters", "steps", "tokens"))]
    cells += [f"{found['bits_per_byte']:.4f}", f"{found['best_bits_per_byte']:.4f}"]
    cells += [f"{found['tokens_per_second']:,.0f}", f"{found['hours']:.2f}"]
    return render([*header, "hours"], [cells])


def count(text: str) -> int:
    """A number of tokens: 5000, 2M, 1.8B.

    >>> count("16k"), count("2M"), count("1.8B")
    (16000, 2000000, 1800000000)
    """
    return _scaled(text, {"k": 10**3, "m": 10**6, "b": 10**9})


def power_count(text: str) -> int:
    """A number of tokens in powers of 1,024: 16k is 16,384.

    >>> power_count("16k"), power_count("0.5M"), power_count("131072")
    (16384, 524288, 131072)
    """
    return _scaled(text, {"k": 2**10, "m": 2**20})


def _scaled(text: str, units: dict[str, int]) -> int:
    unit = units.get(text[-1:].lower())
    number = float(text[:-1]) * unit if unit else float(text)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(number)


def _reader(name: str, kind: Any) -> Any:
    return power_count if name in ("batch_tokens", "seq_len") else kind


def _draw(folder: Path, chosen: PretrainRecipe) -> list[Path]:
    """The learning curve, if matplotlib is there."""
    from kalman_attention.train.metrics import read_metrics

    try:
        from kalman_attention.plots.files import save_figure
        from kalman_attention.plots.pretraining import plot_pretraining
    except ModuleNotFoundError:
        print("no learning curve: pip install 'kalman_attention[plot]'")
        return []
    figure = plot_pretraining(read_metrics(folder), chosen.batch_tokens, title=chosen.model)
    return save_figure(figure, folder / "curve.png")
