"""``kla bench mixers``: all mixers at equal width and state, and public ones on CPU."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from kalman_attention._tables import render
from kalman_attention._text import unknown
from kalman_attention.benchmarks.layer import transformers_mamba
from kalman_attention.benchmarks.measure import (
    PASSES,
    available_memory,
    fastest,
    layer_pass,
    save_results,
    use_threads,
)
from kalman_attention.benchmarks.options import MixerOptions, settings
from kalman_attention.models.mixers import MIXERS
from kalman_attention.models.sizes import mixer_size

UNMATCHED = ("lstm",)
"""Mixers whose state size follows from their width: compared only on request."""


def bench_mixers(options: MixerOptions, *, out: Path | None = None) -> dict[str, Any]:
    """Time all mixers, and public implementations where installed; print tables.

    Args:
        options: sizes, mixers and effort.
        out: folder for ``mixers.json`` and figures; None writes nothing.

    Returns:
        The settings, the sizes of the mixers, their times and those of public implementations.
    """
    wrong = [name for name in options.mixers or () if name not in MIXERS]
    if wrong:
        raise ValueError(unknown("mixer", wrong[0], MIXERS))
    width, state = options.width, options.state
    names = options.mixers or [name for name in MIXERS if name not in UNMATCHED]
    configs = {name: matched_options(name, width, state) for name in names}
    sizes = {name: mixer_size(name, config) for name, config in configs.items()}
    layers = {name: MIXERS[name].module(config) for name, config in configs.items()}
    print(f"width {width}, batch {options.batch}, best of interleaved runs\n")
    cells = [[n, f"{s.parameters:,}", f"{s.state:,}" if s.state else "-"] for n, s in sizes.items()]
    print(render(["mixer", "parameters", "state"], cells))
    with use_threads(options.threads):
        passes = {kind: _time_mixers(layers, back, options) for kind, back in PASSES.items()}
        for kind, found in passes.items():
            print(f"\n{kind} (ms)\n")
            print(_table(found, options.lengths))
        against = [row for rival in RIVALS for row in _time_rival(rival, layers, options)]
    if against:
        print("\nagainst public implementations on CPU (ms)\n")
        print(_rival_table(against))
    sweep = {"shape": f"width {width}, d_state {state}", "passes": passes}
    results = {
        "settings": settings("mixers", options),
        "sizes": {name: size._asdict() for name, size in sizes.items()},
        "sweep": sweep,
        "rivals": against,
    }
    if out is not None:
        save_results(out / "mixers.json", results)
        print(f"\nresults: {out / 'mixers.json'}")
        _draw(out, sweep)
    return results


def matched_options(mixer: str, width: int, state: int) -> Any:
    """Options of a mixer with the state size of a KLA layer: 2 x state x width numbers.

    The shapes are those of the paper's tables: Mamba with expand 2, GLA with keys of half the
    width, Gated DeltaNet with square heads, mLSTM with a stream of twice the width (its normaliser
    is not counted). Attention has no fixed state, and that of an LSTM follows from its width.

    Args:
        mixer: name of the mixer in a plan.
        width: ``d_model``, a multiple of 4 x ``state``.
        state: ``d_state`` of KLA.
    """
    if width % (4 * state):
        raise ValueError(
            f"width = {width} must be a multiple of 4 x d_state = {4 * state}, so that heads of "
            "whole channels give equal states."
        )
    shapes: dict[str, dict[str, Any]] = {
        "kla": {"d_state": state},
        "mamba": {"d_state": state, "expand": 2},
        "gla": {"num_heads": width // (4 * state), "expand_k": 0.5, "expand_v": 1.0},
        "gated_deltanet": {"num_heads": width // (2 * state), "expand_k": 1.0, "expand_v": 1.0},
        "mlstm": {"num_heads": 2 * width // state, "proj_factor": 2.0},
    }
    return MIXERS[mixer].config(d_model=width, **shapes.get(mixer, {}))


class Rival(NamedTuple):
    """A public implementation of one of our mixers.

    Attributes:
        mixer: name of our mixer.
        package: package with the implementation.
        build: builds the layer from a width, a ``d_state`` and a sequence length; returns None if
            the package is not installed.
        quadratic: number of T x T matrices that it keeps per head.
    """

    mixer: str
    package: str
    build: Callable[[int, int, int], nn.Module | None]
    quadratic: int = 0


def _transformers_mamba(width: int, state: int, length: int) -> nn.Module | None:
    return transformers_mamba(width, state)


def _mambapy(width: int, state: int, length: int) -> nn.Module | None:
    if importlib.util.find_spec("mambapy") is None:
        return None
    from mambapy.mamba import MambaBlock, MambaConfig

    block: nn.Module = MambaBlock(MambaConfig(d_model=width, n_layers=1, d_state=state))
    return block


@contextlib.contextmanager
def hidden(package: str) -> Iterator[None]:
    """Hide a package from imports: transformers binds its GPU kernels even for CPU tensors."""
    names = [name for name in sys.modules if name.split(".")[0] == package]
    before = {name: sys.modules.pop(name) for name in names}
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        sys.modules.update(before)


def _qwen3_next(width: int, state: int, length: int) -> nn.Module | None:
    if importlib.util.find_spec("transformers") is None:
        return None
    with hidden("fla"):
        from transformers.models.qwen3_next.modeling_qwen3_next import (
            Qwen3NextConfig,
            Qwen3NextGatedDeltaNet,
        )

    ours = matched_options("gated_deltanet", width, state)
    config = Qwen3NextConfig(
        hidden_size=width,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=ours.num_heads,
        linear_num_value_heads=ours.num_heads,
        linear_key_head_dim=ours.key_dim,
        linear_value_head_dim=ours.value_dim,
    )
    layer: nn.Module = Qwen3NextGatedDeltaNet(config, layer_idx=0)
    return layer


def _xlstm(width: int, state: int, length: int) -> nn.Module | None:
    if importlib.util.find_spec("xlstm") is None:
        return None
    from xlstm.blocks.mlstm.layer import mLSTMLayer, mLSTMLayerConfig

    heads = matched_options("mlstm", width, state).num_heads
    config = mLSTMLayerConfig(embedding_dim=width, num_heads=heads, context_length=length)
    layer: nn.Module = mLSTMLayer(config)
    return layer


RIVALS = (
    Rival("mamba", "transformers", _transformers_mamba),
    Rival("mamba", "mambapy", _mambapy),
    Rival("gated_deltanet", "transformers (Qwen3-Next)", _qwen3_next),
    Rival("mlstm", "xlstm", _xlstm, quadratic=8),
)
"""What our mixers are compared with. There is no public GLA layer that runs on CPU."""


def _time_mixers(
    layers: dict[str, nn.Module], backward: bool, options: MixerOptions
) -> dict[str, Any]:
    """Minimum times of every mixer at every length, in the form that ``draw_scaling`` takes."""
    found: dict[str, Any] = {name: {"seconds": {}, "gave_up": None} for name in layers}
    for length, following in zip(options.lengths, [*options.lengths[1:], 0], strict=True):
        x = torch.randn(options.batch, length, options.width)
        chosen = {name: layer for name, layer in layers.items() if not found[name]["gave_up"]}
        work = {n: layer_pass(layer, [x], backward=backward) for n, layer in chosen.items()}
        for name, seconds in fastest(work, most=options.repeats, seconds=options.seconds).items():
            found[name]["seconds"][length] = seconds
            # Attention grows fastest, with the square of the length.
            if seconds * (following / length) ** 2 > options.patience:
                found[name]["gave_up"] = f"over {options.patience:g} s at T={following}"
    return found


def _time_rival(
    rival: Rival, layers: dict[str, nn.Module], options: MixerOptions
) -> list[dict[str, Any]]:
    """Our layer and the public one, interleaved, at every length that the public one can handle."""
    rows: list[dict[str, Any]] = []
    if rival.mixer not in layers:
        return rows
    for kind, backward in PASSES.items():
        last: tuple[int, float] | None = None
        for length in sorted(options.rivals_at):
            if backward and length > options.rivals_backward_up_to:
                continue
            theirs = rival.build(options.width, options.state, length)
            heads = matched_options("mlstm", options.width, options.state).num_heads
            need = 4 * rival.quadratic * heads * options.batch * length**2  # bytes in float32
            slow = last is not None and last[1] * (length / last[0]) ** 2 > options.patience
            if theirs is None or slow or need > available_memory():
                continue
            x = torch.randn(options.batch, length, options.width)
            pair = {"ours": layers[rival.mixer], "theirs": theirs}
            work = {name: layer_pass(side, [x], backward=backward) for name, side in pair.items()}
            seconds = fastest(work, most=options.rival_repeats, seconds=options.seconds)
            last = (length, seconds["theirs"])
            about = {"mixer": rival.mixer, "package": rival.package}
            rows.append({**about, "T": length, "pass": kind, "seconds": seconds})
    return rows


def _table(found: dict[str, Any], lengths: Sequence[int]) -> str:
    rows = []
    for length in lengths:
        times = [row["seconds"].get(length) for row in found.values()]
        rows.append([str(length), *(f"{1e3 * s:.1f}" if s else "-" for s in times)])
    return render(["T", *found], rows)


def _rival_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        ours, theirs = row["seconds"]["ours"], row["seconds"]["theirs"]
        cells = [row["mixer"], row["package"], row["pass"], str(row["T"])]
        lines.append([*cells, f"{1e3 * ours:.1f}", f"{1e3 * theirs:.1f}", f"{theirs / ours:.2f}"])
    return render(["mixer", "package", "pass", "T", "ours", "theirs", "theirs / ours"], lines)


def _draw(folder: Path, sweep: dict[str, Any]) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        return
    from kalman_attention.plots.speed import draw_scaling

    for path in draw_scaling(folder, sweep, "mixers"):
        print(f"figure: {path}")
