"""State tracking over length: how many sequences are right, and how many blocks it takes."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def plot_accuracy_over_length(
    lengths: Sequence[int], panels: Mapping[str, Mapping[str, Sequence[float | None]]], trained: int
) -> Figure:
    """Share of whole sequences right over their length, one line per model.

    Args:
        lengths: of the test sequences.
        panels: title to model to shares between 0 and 1, one for each length; None is left out.
        trained: longest length in training, marked.
    """
    figure, row = plt.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 3.6), layout="constrained", squeeze=False
    )
    names = [*dict.fromkeys(name for models in panels.values() for name in models)]
    for axes, (title, models) in zip(row[0], panels.items(), strict=True):
        for name, shares in models.items():
            i = names.index(name)
            points = [(n, 100 * x) for n, x in zip(lengths, shares, strict=True) if x is not None]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=f"C{i}", label=name)
        axes.axvline(trained, color="0.7", lw=1, ls="--")
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(lengths), [f"{n:,}" for n in lengths])
        axes.set(title=title, xlabel="length", ylim=(-3, 103))
        axes.grid(alpha=0.3)
    row[0][0].set_ylabel("whole sequences right, %")
    shown = [
        pair for axes in row[0] for pair in zip(*axes.get_legend_handles_labels(), strict=True)
    ]
    lines = {label: handle for handle, label in shown}  # one line per model, wherever it is
    figure.legend(
        [*lines.values()], [*lines], loc="outside right center", frameon=False, fontsize=8
    )
    return figure


def plot_fewest_blocks(
    lengths: Sequence[int], models: Mapping[str, Sequence[int | None]], deepest: int
) -> Figure:
    """Fewest blocks that solve a length (``fig:a5-min-layers``), one line per model.

    Args:
        lengths: of the test sequences.
        models: name to fewest blocks for each length; None for more than were tried.
        deepest: number of blocks up to which was tried; beyond stands what was not solved.
    """
    figure, axes = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    for i, (name, fewest) in enumerate(models.items()):
        shift = 0.03 * (i - len(models) / 2)  # lines that coincide stay visible
        blocks = [(deepest + 1 if n is None else n) + shift for n in fewest]
        axes.plot(list(lengths), blocks, "o-", color=f"C{i}", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lengths), [f"{n:,}" for n in lengths])
    ticks = [*range(1, deepest + 2)]
    axes.set_yticks(ticks, [*(str(n) for n in ticks[:-1]), f"> {deepest}"])
    axes.set(xlabel="length", ylabel="fewest blocks with 90 % right")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return figure
