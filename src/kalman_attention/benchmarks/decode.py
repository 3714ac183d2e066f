"""``kla bench decode``: time per decoded token against the length of the context."""

import argparse
import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kalman_attention import KLAConfig, LanguageModel, LanguageModelConfig
from kalman_attention._tables import render
from kalman_attention.benchmarks.layer import settings
from kalman_attention.benchmarks.measure import fastest, save_results

_PREFILL = 1024  # tokens per chunk of the prompt
_VOCABULARY = 1024
_ROW = 1024  # numbers in a row of the matrix whose reading is the bound
_DTYPES = (torch.float32, torch.bfloat16)
_COLUMNS = ("milliseconds", "bound", "ratio")


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
    ratios = against_memory(args)
    print(f"\n{args.preset}, batch 1, ms per token; the bound is one reading of its matrices\n")
    told = [[row["weights"], *(f"{row[name]:.2f}" for name in _COLUMNS)] for row in ratios]
    print(render(["weights", "ms", "bound ms", "of the bound"], told))
    found = {"settings": settings(args), "rows": rows, args.preset: ratios}
    save_results(args.out / "decode.json", found)
    print(f"\nresults: {args.out / 'decode.json'}")
    if not args.no_plot:
        _draw(args.out / "decode.png", args.contexts, times)
    return 0


def _draw(path: Path, contexts: list[int], times: dict[str, list[float]]) -> None:
    try:
        from kalman_attention.plots.speed import plot_decode_speed
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
def against_memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time per token of a preset, by type of its weights, and the time that its bytes take."""
    plain = LanguageModel(args.preset).eval()
    runs: dict[str, Callable[[], None]] = {}
    for dtype in _DTYPES:
        model = copy.deepcopy(plain).to(dtype)
        token, states = prefill(model, 1, 1, args.tokens)
        runs[str(dtype)] = functools.partial(decode, model, token, states, args.tokens)
        for name, read in readings(model).items():
            runs[f"{dtype} {name}"] = functools.partial(repeat, read, args.tokens)
    least = fastest(runs, most=args.repeats, seconds=args.seconds / 4)
    rows = []
    for weights in map(str, _DTYPES):
        times = [1e3 / args.tokens * s for name, s in least.items() if name.startswith(weights)]
        ms, bound = times[0], min(times[1:])
        values = (ms, bound, ms / bound)
        rows.append(
            {"weights": weights.removeprefix("torch."), **dict(zip(_COLUMNS, values, strict=True))}
        )
    return rows


def readings(model: LanguageModel) -> dict[str, Callable[[], object]]:
    """Ways to read as many bytes as a token needs, all at once; the faster one is the bound."""
    matrices = [x.weight for x in model.modules() if isinstance(x, torch.nn.Linear)]
    numbers = sum(x.numel() * x.element_size() for x in matrices) // 4
    matrix, vector = torch.randn(numbers // _ROW, _ROW), torch.randn(_ROW)
    return {"sum": matrix.sum, "product": functools.partial(torch.mv, matrix, vector)}


def repeat(call: Callable[[], object], times: int) -> None:
    """Call something several times."""
    for _ in range(times):
        call()


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
