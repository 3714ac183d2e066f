"""``kla bench decode``: time per decoded token over the length of the context."""

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kalman_attention import KLAConfig, LanguageModel, LanguageModelConfig
from kalman_attention._tables import render
from kalman_attention.benchmarks.measure import fastest, save_results, use_threads
from kalman_attention.benchmarks.options import DecodeOptions, settings

_PREFILL = 1024  # tokens per chunk of the prompt
_VOCABULARY = 1024
_ROW = 1024  # numbers in a row of the matrix that is read for the bound
_DTYPES = (torch.float32, torch.bfloat16)
_COLUMNS = ("milliseconds", "bound", "ratio")


def bench_decode(
    options: DecodeOptions, *, out: Path | None = None, plot: bool = True
) -> dict[str, Any]:
    """Time greedy decoding of KLA and attention, and of a preset against memory; print tables.

    Args:
        options: sizes and effort.
        out: folder for ``decode.json`` and ``decode.png``; None writes nothing.
        plot: whether to draw the figure.

    Returns:
        The settings, one row per model, and one row per dtype under the name of the preset.
    """
    with use_threads(options.threads):
        times = time_contexts(options)
        _print_times(times, options)
        against = compare_with_memory(options)
    print(f"\n{options.preset}, batch 1, ms per token; the bound is one reading of its matrices\n")
    told = [[row["weights"], *(f"{row[name]:.2f}" for name in _COLUMNS)] for row in against]
    print(render(["weights", "ms", "bound ms", "of the bound"], told))
    rows = [
        {"model": name, "contexts": list(options.contexts), "milliseconds": ms}
        for name, ms in times.items()
    ]
    results = {"settings": settings("decode", options), "rows": rows, options.preset: against}
    if out is not None:
        save_results(out / "decode.json", results)
        print(f"\nresults: {out / 'decode.json'}")
        if plot:
            _draw(out / "decode.png", options.contexts, times)
    return results


def _print_times(times: dict[str, list[float]], options: DecodeOptions) -> None:
    names, batch = list(times), options.batch
    header = ["context", *(f"{n} ms" for n in names), *(f"{n} tokens/s" for n in names)]
    lines = []
    for i, context in enumerate(options.contexts):
        ms = [times[name][i] for name in names]
        rates = [f"{1e3 * batch / t:.0f}" for t in ms]
        lines.append([str(context), *(f"{t:.2f}" for t in ms), *rates])
    sizes = f"{options.depth} blocks of width {options.width}, batch {batch}"
    print(f"{sizes}, greedy, ms per token\n")
    print(render(header, lines))
    for name in names:
        low, high = min(times[name]), max(times[name])
        print(f"{name}: slowest context takes {high / low:.2f} x the fastest")


def _draw(path: Path, contexts: Sequence[int], times: dict[str, list[float]]) -> None:
    try:
        from kalman_attention.plots.speed import plot_decode_speed
    except ImportError:
        print("no plot: pip install 'kalman_attention[plot]'")
        return
    plot_decode_speed(contexts, times).savefig(path, dpi=150)
    print(f"plot: {path}")


@torch.no_grad()
def time_contexts(options: DecodeOptions) -> dict[str, list[float]]:
    """Milliseconds per token at every context, by model: minima of interleaved rounds."""
    work: dict[str, dict[str, Callable[[], None]]] = {}
    tokens = options.tokens
    for name in ("kla", "attention"):
        model, work[name] = build_model(name, options), {}
        for context in options.contexts:
            token, states = prefill(model, options.batch, context, tokens)
            work[name][str(context)] = functools.partial(decode, model, token, states, tokens)
    # Contexts take turns within a model, and models take turns twice: were they mixed, the context
    # that follows a long cache would pay for bringing the weights back from memory. Each of the
    # four turns gets a quarter of the time, and each of the two of a model half of its rounds.
    turns = [
        {name: fastest(runs, most=max(1, options.repeats // 2), seconds=options.seconds / 4)}
        for name, runs in 2 * list(work.items())
    ]
    return {
        name: [
            1e3 / tokens * min(turn[name][str(c)] for turn in turns if name in turn)
            for c in options.contexts
        ]
        for name in work
    }


@torch.no_grad()
def compare_with_memory(options: DecodeOptions) -> list[dict[str, Any]]:
    """Time per token of a preset, by dtype of its weights, and the time to read those once."""
    plain, tokens = LanguageModel(options.preset).eval(), options.tokens
    runs: dict[str, Callable[[], None]] = {}
    for dtype in _DTYPES:
        model = copy.deepcopy(plain).to(dtype)
        token, states = prefill(model, 1, 1, tokens)
        runs[str(dtype)] = functools.partial(decode, model, token, states, tokens)
        for name, read in readings(model).items():
            runs[f"{dtype} {name}"] = functools.partial(repeat, read, tokens)
    least = fastest(runs, most=options.repeats, seconds=options.seconds / 4)
    rows = []
    for weights in map(str, _DTYPES):
        times = [1e3 / tokens * s for name, s in least.items() if name.startswith(weights)]
        ms, bound = times[0], min(times[1:])
        values = (ms, bound, ms / bound)
        rows.append(
            {"weights": weights.removeprefix("torch."), **dict(zip(_COLUMNS, values, strict=True))}
        )
    return rows


def readings(model: LanguageModel) -> dict[str, Callable[[], object]]:
    """Ways to read as many bytes as a token needs, in one call; the faster one is the bound."""
    matrices = [x.weight for x in model.modules() if isinstance(x, torch.nn.Linear)]
    numbers = sum(x.numel() * x.element_size() for x in matrices) // 4
    matrix, vector = torch.randn(numbers // _ROW, _ROW), torch.randn(_ROW)
    return {"sum": matrix.sum, "product": functools.partial(torch.mv, matrix, vector)}


def repeat(call: Callable[[], object], times: int) -> None:
    """Call something several times."""
    for _ in range(times):
        call()


def build_model(mixer: str, options: DecodeOptions) -> LanguageModel:
    """A model of one kind of mixer, without MLPs, so that only the mixers differ."""
    config = LanguageModelConfig(
        vocab_size=_VOCABULARY,
        d_model=options.width,
        plan=(mixer,) * options.depth,
        kla=KLAConfig(d_model=options.width, d_state=options.state),
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
    """Decode greedily; attention overwrites the cache after the same prompt each time."""
    for _ in range(tokens):
        found = model.step(token, states)
        token, states = found.logits.argmax(-1), found.states
