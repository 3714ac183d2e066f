"""The learning curve of a pretraining run."""

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
