"""Scores over a text: every token thin, every window thick, what is unusual shaded."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

Array = NDArray[np.float64]

_LINE, _TOKEN, _SHADE = "#0072B2", "#9aa5b1", "#E69F00"
_NEVER_MORE = 400
"""Tokens beyond which single ones would be a grey mass."""


def plot_scores(
    windows: Mapping[str, Array],
    tokens: Mapping[str, Array],
    *,
    size: int,
    labels: Mapping[str, str],
    thresholds: Mapping[str, float] | None = None,
    unusual: Mapping[str, NDArray[np.bool_]] | None = None,
    title: str = "",
) -> Figure:
    """One panel per score over the tokens of a text.

    Args:
        windows: score to one value per window, ``[n]``.
        tokens: score to one value per token, ``[T]``; nothing for scores of windows only.
        size: tokens of a window; the last one may have fewer.
        labels: score to what stands at its axis.
        thresholds: score to the value that is drawn as the limit of what is usual.
        unusual: score to the windows that are shaded, ``[n]`` bool.
        title: of the figure.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(9.0, 1.2 * len(windows) + 0.9), layout="constrained")
    axes = figure.subplots(len(windows), 1, sharex=True, squeeze=False)[:, 0]
    T = max(len(x) for x in tokens.values())
    for axis, (name, values) in zip(axes, windows.items(), strict=True):
        single, limit = tokens.get(name), (thresholds or {}).get(name)
        if single is not None:
            thin = 0.5 if T <= _NEVER_MORE else 0.2
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
