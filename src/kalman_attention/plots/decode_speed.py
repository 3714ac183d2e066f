"""Time per decoded token against the length of the context."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure


def plot_decode_speed(
    contexts: Sequence[int], milliseconds: Mapping[str, Sequence[float]]
) -> Figure:
    """One line per model; the context axis is logarithmic.

    Args:
        contexts: context lengths.
        milliseconds: time per token at each of them, by model.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(6.0, 4.0), layout="constrained")
    axis = figure.subplots()
    for name, times in milliseconds.items():
        axis.plot(contexts, times, marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axis.set_ylim(bottom=0.0)
    axis.set_xlabel("context (tokens)")
    axis.set_ylabel("time per token (ms)")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure
