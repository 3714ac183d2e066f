"""Learning curves of pretraining runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure


def plot_pretraining(
    records: Sequence[Mapping[str, Any]], batch_tokens: int, *, title: str = ""
) -> Figure:
    """Training loss and validation bits per byte over tokens, side by side.

    Args:
        records: of ``metrics.jsonl``.
        batch_tokens: tokens per update.
        title: of the figure.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(8.0, 3.2), layout="constrained")
    panels = (("train", "loss", "training loss, nats per token"),
              ("eval", "bits_per_byte", "validation bits per byte"))  # fmt: skip
    for axis, (kind, name, label) in zip(figure.subplots(1, 2), panels, strict=True):
        points = [
            (record["step"] * batch_tokens / 1e6, record[name])
            for record in records
            if record["kind"] == kind and record.get(name) is not None
        ]
        axis.plot(*zip(*points, strict=True), lw=1.2, marker="." if kind == "eval" else "")
        axis.set_xlabel("million tokens", fontsize=8)
        axis.set_ylabel(label, fontsize=8)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=9)
    return figure


def plot_comparison(
    curves: Mapping[str, Sequence[tuple[float, float]]], *, skip: float = 0.1
) -> Figure:
    """Validation bits per byte of several runs over tokens.

    Args:
        curves: name to pairs (tokens, bits per byte).
        skip: the part at the beginning that is not shown, where all fall steeply.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axis = figure.subplots()
    for name, points in curves.items():
        begin = skip * points[-1][0]
        shown = [(tokens / 1e6, bits) for tokens, bits in points if tokens >= begin]
        axis.plot(*zip(*shown, strict=True), lw=1.4, marker=".", label=name)
    axis.set_xlabel("million tokens", fontsize=9)
    axis.set_ylabel("validation bits per byte", fontsize=9)
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=8)
    return figure
