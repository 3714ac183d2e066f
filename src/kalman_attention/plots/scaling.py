"""The paper's scaling figures: runtime over sequence length, one line per implementation."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt


def draw_scaling(path: Path, sweep: dict[str, Any], kind: str) -> None:
    """Draw one pass of ``kla bench scan`` on logarithmic axes.

    Args:
        path: file to write; an SVG is written beside it.
        sweep: the entry ``sweep`` of the benchmark's results.
        kind: which pass, "forward" or "forward + backward".
    """
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for i, (engine, row) in enumerate(sweep["passes"][kind].items()):
        points = sorted((int(T), seconds) for T, seconds in row["seconds"].items())
        if not points:
            continue
        lengths, seconds = zip(*points, strict=True)
        milliseconds = [1e3 * s for s in seconds]
        axes.loglog(lengths, milliseconds, "o-", color=f"C{i}", base=2, label=engine)
        if row["gave_up"]:
            axes.loglog(lengths[-1], milliseconds[-1], "x", color=f"C{i}", ms=12, mew=2)
            note = "memory" if "memory" in row["gave_up"] else "time"
            axes.annotate(
                f"gives up: {note}",
                (lengths[-1], milliseconds[-1]),
                textcoords="offset points",
                xytext=(6, 4),
                fontsize=8,
            )
    axes.set_yscale("log", base=10)
    axes.set(xlabel="sequence length T", ylabel="milliseconds", title=f"{kind}, {sweep['shape']}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    figure.savefig(path.with_suffix(".svg"))
    plt.close(figure)
