"""``kla bench decode``: time per decoded token against the length of the context."""

import argparse
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kalman_attention import KLAConfig, LanguageModel, LanguageModelConfig
from kalman_attention.cli.bench.layer import settings
from kalman_attention.cli.bench.measure import fastest, save_results
from kalman_attention.cli.table import render
from kalman_attention.models.generation import arrange_for_decoding

_PREFILL = 1024  # tokens per chunk of the prompt
_VOCABULARY = 1024


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the numbers."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    times = measure(args)
    names = list(times)
    header = ["context", *(f"{n} ms" for n in names), *(f"{n} tokens/s" for n in names)]
    lines = []
    for i, context in enumerate(args.contexts):
        ms = [times[name][i] for name in names]
        rates = [f"{1e3 * args.batch / t:.0f}" for t in ms]
        lines.append([str(context), *(f"{t:.2f}" for t in ms), *rates])
    print(f"{args.depth} blocks of width {args.width}, batch {args.batch}, greedy, ms per token\n")
    print(render(header, lines))
    for name in names:
        low, high = min(times[name]), max(times[name])
        print(f"{name}: slowest context takes {high / low:.2f} x the fastest")
    rows = [{"model": n, "contexts": args.contexts, "milliseconds": times[n]} for n in names]
    bytes_once = against_memory(args)
    print(f"\n{args.preset}, batch 1, ms per token; reading its matrices once is the bound\n")
    bound = bytes_once["matrices read once"]
    told = [[name, f"{ms:.2f}", f"{ms / bound:.2f}"] for name, ms in bytes_once.items()]
    print(render(["weights", "ms", "of the bound"], told))
    found = {"settings": settings(args), "rows": rows, args.preset: bytes_once}
    save_results(args.out / "decode.json", found)
    print(f"\nresults: {args.out / 'decode.json'}")
    if not args.no_plot:
        _draw(args.out / "decode.png", args.contexts, times)
    return 0


def _draw(path: Path, contexts: list[int], times: dict[str, list[float]]) -> None:
    try:
        from kalman_attention.plots.decode_speed import plot_decode_speed
    except ImportError:
        print("no plot: pip install 'kalman_attention[plot]'")
        return
    plot_decode_speed(contexts, times).savefig(path, dpi=150)
    print(f"plot: {path}")


@torch.no_grad()
def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds per token at every context, by model; best of interleaved rounds."""
    work: dict[str, dict[str, Callable[[], None]]] = {}
    for name in ("kla", "attention"):
        model, work[name] = build(name, args), {}
        for context in args.contexts:
            token, states = prefill(model, args.batch, context, args.tokens)
            work[name][str(context)] = functools.partial(decode, model, token, states, args.tokens)
    # Contexts take turns, models take turns twice: were they mixed, the context that comes after a
    # long cache would pay for bringing the weights back from memory.
    turns = [
        {name: fastest(runs, most=max(1, args.repeats // 2), seconds=args.seconds / 4)}
        for name, runs in 2 * list(work.items())
    ]
    return {
        name: [
            1e3 / args.tokens * min(turn[name][str(c)] for turn in turns if name in turn)
            for c in args.contexts
        ]
        for name in work
    }


@torch.no_grad()
def against_memory(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per token of a preset, by layout and type of its weights, and of its bytes."""
    plain = LanguageModel(args.preset).eval()
    arranged = copy.deepcopy(plain)
    arrange_for_decoding(arranged)
    models = {
        "float32, row by row": plain,
        "float32, arranged": arranged,
        "bfloat16, arranged": copy.deepcopy(arranged).bfloat16(),
    }
    runs: dict[str, Callable[[], None]] = {}
    for name, model in models.items():
        token, states = prefill(model, 1, 1, args.tokens)
        runs[name] = functools.partial(decode, model, token, states, args.tokens)
    matrices = [x.weight for x in plain.modules() if isinstance(x, torch.nn.Linear)]
    runs["matrices read once"] = functools.partial(read, matrices, args.tokens)
    found = fastest(runs, most=args.repeats, seconds=args.seconds / 4)
    return {name: 1e3 / args.tokens * seconds for name, seconds in found.items()}


def read(matrices: list[torch.Tensor], times: int) -> None:
    """Bring all numbers from memory: their sum is the cheapest use of them."""
    for _ in range(times):
        for matrix in matrices:
            matrix.sum()


def build(mixer: str, args: argparse.Namespace) -> LanguageModel:
    """A model of one kind of mixer; no MLP in either, so that only the mixers differ."""
    config = LanguageModelConfig(
        vocab_size=_VOCABULARY,
        d_model=args.width,
        plan=(mixer,) * args.depth,
        kla=KLAConfig(d_model=args.width, d_state=args.state),
    )
    return LanguageModel(config).eval()


def prefill(model: LanguageModel, batch: int, context: int, new: int) -> tuple[Any, Any]:
    """Read a random prompt of ``context`` tokens, in chunks."""
    ids = torch.randint(_VOCABULARY, (batch, context))
    states = model.init_states(batch, capacity=context + new)
    for part in torch.split(ids, _PREFILL, 1):
        found = model.prefill(part, states=states)
        states = found.states
    return found.logits.argmax(-1), states


@torch.no_grad()
def decode(model: LanguageModel, token: torch.Tensor, states: Any, tokens: int) -> None:
    """Greedy decoding; attention writes its cache in place, beyond the same prompt each time."""
    for _ in range(tokens):
        found = model.step(token, states)
        token, states = found.logits.argmax(-1), found.states
