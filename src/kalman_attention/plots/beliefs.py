"""Beliefs and uncertainty: posteriors over time, attention maps, scores of texts, series."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

Scores = NDArray[np.float64]
Bands = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
"""Times, means, lower bounds and upper bounds."""

_LINE, _TOKEN, _SHADE = "#0072B2", "#9aa5b1", "#E69F00"
_FEW_TOKENS = 400  # beyond this, lines of single tokens of the same width would be a grey mass


def draw_belief(
    path: Path,
    signal: Tensor,
    values: Tensor,
    mean: Tensor,
    variance: Tensor,
    *,
    observed: Tensor,
) -> None:
    """Draw the posterior over time and save it.

    Args:
        path: file to write; its suffix sets the format.
        signal: the true signal, ``[T]``.
        values: noisy observations, ``[T]``.
        mean: posterior mean, ``[T]``.
        variance: posterior variance, ``[T]``.
        observed: mask of the values that the filter sees, ``[T]`` bool.
    """
    t = range(len(signal))
    band = 1.96 * variance.sqrt()
    figure, axes = plt.subplots(figsize=(7, 3.3), layout="constrained")
    axes.fill_between(
        t, mean - band, mean + band, color="C0", alpha=0.25, lw=0, label="95 % interval"
    )
    axes.plot(t, signal, color="0.25", lw=1, ls="--", label="signal")
    axes.plot(t, mean, color="C0", lw=2, label="posterior mean")
    seen = observed.nonzero().flatten()
    axes.plot(seen, values[seen], ".", color="C1", ms=4, label="observations")
    gap = (~observed).nonzero().flatten().float()
    if len(gap):
        low = axes.get_xaxis_transform()
        note = axes.text(gap.mean().item(), 0.05, "nothing\nobserved", ha="center", transform=low)
        note.set(fontsize=13, color="0.35")
    axes.set_xlabel("token", fontsize=13)
    axes.set_xlim(0, len(signal) - 1)
    axes.tick_params(labelsize=12)
    # Above the axes, and large: on a phone the figure is shown at half its size.
    figure.legend(
        ncols=4,
        loc="outside upper center",
        frameon=False,
        fontsize=13,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.2,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_posterior_variance(
    variance: Tensor,
    gain: Tensor | None = None,
    tokens: Sequence[object] | None = None,
    *,
    marked: Sequence[int] = (),
) -> Figure:
    """Plot the variance of every channel over the tokens, its mean, and the mean Kalman gain.

    Args:
        variance: posterior variance of one block's read-out for one sequence, ``[T, D]``.
        gain: Kalman gain of the same block, ``[T, D]``.
        tokens: labels of the time axis; left out if there are too many to be legible.
        marked: positions to mark, such as those of the tokens to copy.

    Returns:
        The figure.
    """
    T = variance.shape[0]
    rows = 2 if gain is None else 3
    figure = Figure(figsize=(max(6.0, min(14.0, 0.12 * T)), 2.2 * rows), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    order = variance.float().mean(0).argsort()
    image = axes[0].imshow(
        variance.float()[:, order].T.numpy(), aspect="auto", interpolation="nearest", origin="lower"
    )
    figure.colorbar(image, ax=axes[0], label="variance")
    axes[0].set_ylabel("channel (sorted)")
    axes[1].plot(variance.float().mean(1).numpy(), color="tab:blue")
    axes[1].set_ylabel("mean variance")
    if gain is not None:
        axes[2].bar(range(T), gain.float().mean(1).tolist(), color="tab:orange")
        axes[2].set_ylabel("mean gain")
    for axis in axes[1:]:
        for position in marked:
            axis.axvline(position, color="tab:red", lw=0.6, alpha=0.5, zorder=0)
    axes[-1].set_xlabel("token")
    if tokens is not None and T <= 80:
        axes[-1].set_xticks(range(T), [str(t) for t in tokens], rotation=90, fontsize=7)
    return figure


def plot_attention_maps(
    maps: Tensor, titles: Sequence[str] | None = None, tokens: Sequence[object] | None = None
) -> Figure:
    """Plot Kalman attention maps: the weight of each token in each read-out.

    See the appendix ``sec:attn-matrix``. Each map has a symmetric colour scale up to its own
    largest weight.

    Args:
        maps: one matrix per channel, ``[C, T, T]``, as ``evaluation.uncertainty.attention_maps``
            returns them for one sequence.
        titles: one title per map.
        tokens: labels of both axes; left out if there are too many to be legible.

    Returns:
        The figure.
    """
    C, T = maps.shape[0], maps.shape[-1]
    figure = Figure(figsize=(3.2 * C + 0.8, 3.4), layout="constrained")
    axes = figure.subplots(1, C, squeeze=False)[0]
    for i, axis in enumerate(axes):
        # Channels differ by orders of magnitude: on a common scale all but one would be blank.
        largest = float(maps[i].abs().max())
        shares = maps[i].float().numpy() / (largest or 1.0)
        image = axis.imshow(shares, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
        title = titles[i] if titles is not None else f"channel {i}"
        axis.set_title(f"{title}, largest {largest:.2g}", fontsize=9)
        axis.set_xlabel("token s")
        if tokens is not None and T <= 40:
            labels = [str(t) for t in tokens]
            axis.set_xticks(range(T), labels, rotation=90, fontsize=6)
            axis.set_yticks(range(T), labels, fontsize=6)
    axes[0].set_ylabel("read-out t")
    figure.colorbar(image, ax=list(axes), label="weight of v_s in y_t / largest")
    return figure


def plot_scores(
    windows: Mapping[str, Scores],
    tokens: Mapping[str, Scores],
    *,
    size: int,
    labels: Mapping[str, str],
    thresholds: Mapping[str, float] | None = None,
    unusual: Mapping[str, NDArray[np.bool_]] | None = None,
    title: str = "",
) -> Figure:
    """Plot scores over the tokens of a text, one panel per score.

    Tokens are thin lines, windows are thick ones, and unusual windows are shaded.

    Args:
        windows: maps a score to one value per window, ``[n]``.
        tokens: maps a score to one value per token, ``[T]``; scores of whole windows are absent.
        size: tokens per window; the last window may have fewer.
        labels: maps a score to the label of its axis.
        thresholds: maps a score to the limit of usual values, which is drawn.
        unusual: maps a score to a mask of the windows to shade, ``[n]`` bool.
        title: title of the figure.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(9.0, 1.2 * len(windows) + 0.9), layout="constrained")
    axes = figure.subplots(len(windows), 1, sharex=True, squeeze=False)[:, 0]
    T = max(len(x) for x in tokens.values())
    for axis, (name, values) in zip(axes, windows.items(), strict=True):
        single, limit = tokens.get(name), (thresholds or {}).get(name)
        if single is not None:
            thin = 0.5 if T <= _FEW_TOKENS else 0.2
            axis.plot(np.arange(T) + 0.5, single, color=_TOKEN, lw=thin)
        edges = np.minimum(np.arange(len(values) + 1) * size, T)
        axis.stairs(values, edges, baseline=None, color=_LINE, lw=1.8)
        if limit is not None:
            axis.axhline(limit, color="black", lw=0.8, ls=(0, (4, 3)))
        for i in np.flatnonzero((unusual or {}).get(name, [])):
            axis.axvspan(edges[i], edges[i + 1], color=_SHADE, alpha=0.3, lw=0, zorder=0)
        axis.set_ylabel(labels.get(name, name), fontsize=8)
        axis.tick_params(labelsize=8)
        axis.margins(x=0.0)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("token", fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.align_ylabels(list(axes))
    return figure


def plot_bands(
    times: NDArray[Any],
    values: NDArray[Any],
    parts: Sequence[Bands],
    *,
    level: float = 0.95,
    hidden: tuple[NDArray[Any], NDArray[Any]] | None = None,
    ylabel: str = "",
    axes: Any = None,
) -> Figure:
    """Plot the values of a series, and bands around its mean.

    Args:
        times: times of the observed values.
        values: observed values.
        parts: bands; the first given all values, the second, if any, a forecast.
        level: probability of the bands, for the legend.
        hidden: times and values that were held out, for comparison.
        ylabel: label of the vertical axis.
        axes: matplotlib axes to draw into; by default a new figure is created.

    Returns:
        The figure.
    """
    figure = axes.figure if axes is not None else plt.figure(figsize=(9, 3.2), layout="constrained")
    axes = axes if axes is not None else figure.add_subplot()
    for part, color, label in zip(
        parts, ("C0", "C2"), ("given all values", "forecast"), strict=False
    ):
        at, mean, lower, upper = part
        axes.fill_between(
            at, lower, upper, color=color, alpha=0.25, lw=0, label=f"{level:.0%}".replace("%", " %")
        )
        axes.plot(at, mean, color=color, lw=1.5, label=label)
    axes.plot(times, values, ".", color="0.25", ms=4, label="seen")
    if hidden is not None:
        axes.plot(*hidden, "x", color="C3", ms=4, label="hidden")
    axes.set_ylabel(ylabel)
    axes.legend(ncols=5, loc="upper right", frameon=False, fontsize=9)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.15 * (high - low))
    found: Figure = figure
    return found
