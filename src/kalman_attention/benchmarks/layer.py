"""``kla bench layer``: the layer against its own matrix products, attention and Mamba."""

import argparse
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from kalman_attention import KLA, Attention, AttentionConfig, KLAConfig
from kalman_attention._tables import render
from kalman_attention.benchmarks.measure import fastest, layer_pass, save_results

_TOO_LONG = 30.0  # seconds per call: a side that is expected to take longer is left out


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the numbers."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    sides = build_sides(args)
    rows: list[dict[str, Any]] = []
    for backward in (False, True):
        slow: set[str] = set()
        for length, following in zip(args.lengths, [*args.lengths[1:], 0], strict=True):
            chosen = {name: side for name, side in sides.items() if name not in slow}
            row = measure(chosen, length, backward, args)
            rows.append(row)
            growth = (following / length) ** 2  # of attention, the steepest
            slow |= {name for name, s in row["seconds"].items() if s * growth > _TOO_LONG}
    print(f"width {args.width}, d_state {args.state}, batch {args.batch}, best of interleaved runs")
    for backward, title in ((False, "forward"), (True, "forward + backward")):
        print(f"\n{title} (ms)\n")
        print(_table([row for row in rows if row["backward"] == backward]))
    save_results(args.out / "layer.json", {"settings": settings(args), "rows": rows})
    print(f"\nresults: {args.out / 'layer.json'}")
    return 0


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The options as plain data."""
    return {k: v for k, v in vars(args).items() if isinstance(v, (int, float, str, list))}


class Products(nn.Module):
    """The matrix products of a KLA layer and nothing else, each on an input of its own."""

    def __init__(self, layer: KLA) -> None:
        super().__init__()
        found = [layer.in_proj, layer.evidence_proj, layer.precision_up, layer.out_proj]
        self.parts = nn.ModuleList(part for part in found if part is not None)

    def inputs(self, batch: int, length: int) -> list[Tensor]:
        """One random input per product."""
        return [torch.randn(batch, length, p.weight.shape[1]) for p in self._linears()]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """All products."""
        return tuple(part(x) for part, x in zip(self._linears(), inputs, strict=True))

    def _linears(self) -> list[nn.Linear]:
        return [part for part in self.parts if isinstance(part, nn.Linear)]


def build_sides(args: argparse.Namespace) -> dict[str, nn.Module]:
    """What is compared, by name."""
    config = KLAConfig(
        d_model=args.width,
        d_state=args.state,
        value=args.value,
        precision_rank=args.precision_rank,
    )
    layer = KLA(config)
    heads = max(1, args.width // 64)
    attention = Attention(AttentionConfig(d_model=args.width, num_heads=heads))
    sides: dict[str, nn.Module] = {
        "products": Products(layer), "kla": layer, "attention": attention
    }  # fmt: skip
    mamba = transformers_mamba(args.width, args.state)
    return sides if mamba is None else {**sides, "mamba": mamba}


def measure(
    sides: dict[str, nn.Module], length: int, backward: bool, args: argparse.Namespace
) -> dict[str, Any]:
    """Best times at one length."""
    work = {}
    for name, side in sides.items():
        if name != "mamba" or length <= args.mamba_up_to:
            inputs = [torch.randn(args.batch, length, args.width)]
            if isinstance(side, Products):
                inputs = side.inputs(args.batch, length)
            work[name] = layer_pass(side, inputs, backward=backward)
    best = fastest(work, most=args.repeats, seconds=args.seconds)
    return {"T": length, "backward": backward, "seconds": best}


def transformers_mamba(width: int, state: int) -> nn.Module | None:
    """The mixer of transformers' Mamba, if that is installed."""
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
