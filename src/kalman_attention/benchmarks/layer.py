"""``kla bench layer``: the layer against its own matrix products, attention and Mamba."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kalman_attention import KLA, Attention, AttentionConfig, KLAConfig
from kalman_attention._tables import render
from kalman_attention.benchmarks.measure import (
    PASSES,
    fastest,
    layer_pass,
    save_results,
    use_threads,
)
from kalman_attention.benchmarks.options import LayerOptions, settings

_TOO_LONG = 30.0  # seconds per call: a layer that is expected to take longer is left out


def bench_layer(options: LayerOptions, *, out: Path | None = None) -> dict[str, Any]:
    """Time the layer and what it is compared with, and print a table.

    Args:
        options: sizes and effort.
        out: folder for ``layer.json``; None writes nothing.

    Returns:
        The settings, and one row for each pass and length.
    """
    with use_threads(options.threads):
        layers = build_layers(options)
        rows = [row for kind in PASSES.values() for row in _time_lengths(layers, kind, options)]
    sizes = f"width {options.width}, d_state {options.state}, batch {options.batch}"
    print(f"{sizes}, best of interleaved runs")
    for title, backward in PASSES.items():
        print(f"\n{title} (ms)\n")
        print(_table([row for row in rows if row["backward"] == backward]))
    results = {"settings": settings("layer", options), "rows": rows}
    if out is not None:
        save_results(out / "layer.json", results)
        print(f"\nresults: {out / 'layer.json'}")
    return results


def _time_lengths(
    layers: dict[str, nn.Module], backward: bool, options: LayerOptions
) -> list[dict[str, Any]]:
    """Times of one pass at every length, without layers that would take too long."""
    rows = []
    for length, following in zip(options.lengths, [*options.lengths[1:], 0], strict=True):
        row = _time_length(layers, length, backward, options)
        rows.append(row)
        # Attention grows fastest, with the square of the length.
        growth = (following / length) ** 2
        slow = {name for name, s in row["seconds"].items() if s * growth > _TOO_LONG}
        layers = {name: layer for name, layer in layers.items() if name not in slow}
    return rows


class Products(nn.Module):
    """The matrix products of a KLA layer and nothing else, each with its own input."""

    def __init__(self, layer: KLA) -> None:
        super().__init__()
        found = [layer.in_proj, layer.evidence_proj, layer.precision_up, layer.out_proj]
        self.parts = nn.ModuleList(part for part in found if part is not None)

    def inputs(self, batch: int, length: int) -> list[Tensor]:
        """One random input per product."""
        return [torch.randn(batch, length, p.weight.shape[1]) for p in self._linears()]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute all products."""
        return tuple(part(x) for part, x in zip(self._linears(), inputs, strict=True))

    def _linears(self) -> list[nn.Linear]:
        return [part for part in self.parts if isinstance(part, nn.Linear)]


def build_layers(options: LayerOptions) -> dict[str, nn.Module]:
    """The layers that are compared, by name."""
    width, state = options.width, options.state
    layer = KLA(
        KLAConfig(
            d_model=width,
            d_state=state,
            value=options.value,
            precision_rank=options.precision_rank,
        )
    )
    heads = max(1, width // 64)  # of 64 channels each
    attention = Attention(AttentionConfig(d_model=width, num_heads=heads))
    layers = {"products": Products(layer), "kla": layer, "attention": attention}
    mamba = transformers_mamba(width, state)
    return layers if mamba is None else {**layers, "mamba": mamba}


def _time_length(
    layers: dict[str, nn.Module], length: int, backward: bool, options: LayerOptions
) -> dict[str, Any]:
    """Minimum times of one pass at one length."""
    work = {}
    for name, layer in layers.items():
        if name != "mamba" or length <= options.mamba_up_to:
            inputs = [torch.randn(options.batch, length, options.width)]
            if isinstance(layer, Products):
                inputs = layer.inputs(options.batch, length)
            work[name] = layer_pass(layer, inputs, backward=backward)
    best = fastest(work, most=options.repeats, seconds=options.seconds)
    return {"T": length, "backward": backward, "seconds": best}


def transformers_mamba(width: int, state: int) -> nn.Module | None:
    """The mixer of Mamba in transformers; None if that is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(hidden_size=width, state_size=state, num_hidden_layers=1)
    mixer: nn.Module = MambaMixer(config, layer_idx=0)
    return mixer


def _table(rows: list[dict[str, Any]]) -> str:
    names = [
        name for name in ("products", "kla", "attention", "mamba") if name in rows[0]["seconds"]
    ]
    header = ["T", *names, "kla / products", "kla / attention"]
    lines = []
    for row in rows:
        s = row["seconds"]
        cells = [f"{1e3 * s[name]:.1f}" if name in s else "-" for name in names]
        ratio = [f"{s['kla'] / s[n]:.2f}" if n in s else "-" for n in ("products", "attention")]
        lines.append([str(row["T"]), *cells, *ratio])
    return render(header, lines)
