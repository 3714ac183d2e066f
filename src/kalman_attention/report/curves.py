"""The points of figures, taken from results; the same for files and for the page."""

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kalman_attention.recipes import state_tracking as tracking
from kalman_attention.recipes.experiment import Experiment, Scale
from kalman_attention.report.charts import Axis, Chart, Line, Panel, Point

Panels: TypeAlias = dict[str, dict[tuple[str, str], list[Point]]]
"""Lines by title of the panel, each by model and variant."""

_WORDS = (
    (r"lr(?=[\d.])", "rate "),
    (r"^1blocks$", "1 block"),
    (r"(?<=\d)blocks$", " blocks"),
    (r"^length(?=\d)", "length "),
    (r"^d(?=\d+$)", "width "),
    (r"_", " "),
)
_DEPTHS = {1: "one block", 2: "two blocks"}


def words(label: str) -> str:
    """Display name of a cell label: ``lr0.003`` is "rate 0.003", ``a4xz5`` "A4 x Z5"."""
    if re.fullmatch(r"[asz]\d+(x[asz]\d+)?", label):
        return label.upper().replace("X", " x ")
    for pattern, meant in _WORDS:
        label = re.sub(pattern, meant, label)
    return label


def learning_curves(experiment: Experiment, results: Sequence[Mapping[str, Any]]) -> Panels:
    """The metric over updates: panels by task or setting, lines by model, medians over seeds."""
    seeds: dict[tuple[str, str, str], list[list[Point]]] = {}
    for result in results:
        line, *rest = [words(v) for k, v in result["labels"].items() if k != "seed"]
        panel, *rest = rest or [""]
        points = [
            (float(p["step"]), float(p[experiment.metric]))
            for p in result.get("curve") or ()
            if p.get(experiment.metric) is not None
        ]
        if points:
            seeds.setdefault((panel, line, ", ".join(rest)), []).append(points)
    panels: Panels = {}
    for (panel, line, variant), curves in seeds.items():
        panels.setdefault(panel, {})[line, variant] = _median(curves)
    return panels


def _median(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """Medians at every step of any curve; where some have ended, of the remaining ones."""
    found: dict[float, list[float]] = {}
    for x, y in (point for curve in curves for point in curve):
        found.setdefault(x, []).append(y)
    return [(x, statistics.median(ys)) for x, ys in sorted(found.items())]


def learning_chart(experiment: Experiment, results: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Learning curves as a chart; empty without results."""
    panels = learning_curves(experiment, results)
    if not panels:
        return []
    metric, share = experiment.metric.replace("_", " "), experiment.metric.endswith("accuracy")
    seeds = {r["labels"].get("seed") for r in results}
    several = ", median over seeds" if len(seeds) > 1 else ""
    return [
        Chart(
            caption=f"Learning curves: {metric} over updates{several}.",
            panels=_shown(panels, 100 if share else 1),
            x=Axis("updates"),
            y=Axis(f"{metric}, %", limits=(0, 100)) if share else Axis(metric),
        )
    ]


def _shown(panels: Panels, factor: float) -> list[Panel]:
    return [
        Panel(
            title,
            [
                Line(name, [(x, factor * y) for x, y in points], variant)
                for (name, variant), points in lines.items()
            ],
        )
        for title, lines in panels.items()
    ]


def over_length(
    results: Sequence[dict[str, Any]], scale: Scale, depth: int
) -> dict[str, dict[str, list[float | None]]]:
    """State tracking: share of entirely correct sequences at each length, by group and model."""
    setting = tracking.SCALES[scale]
    there = {(r["labels"]["task"], r["labels"]["depth"]) for r in results}
    return {
        task: {
            name: [tracking.median(results, name, task, depth, n) for n in setting.test_lens]
            for name in setting.models
        }
        for task in setting.tasks
        if (task, f"{depth}blocks") in there
    }


def length_chart(
    lengths: Sequence[int],
    panels: Mapping[str, Mapping[str, Sequence[float | None]]],
    trained: int,
    caption: str,
) -> Chart:
    """Share of entirely correct sequences over length; the longest training length is marked."""
    shown = [
        Panel(
            words(title),
            [
                Line(name, [(n, 100 * x) for n, x in pairs])
                for name, shares in lines.items()
                if (pairs := _known(lengths, shares))
            ],
        )
        for title, lines in panels.items()
    ]
    ticks = {float(n): f"{n:,}" for n in lengths}
    x = Axis("length", base=2, ticks=ticks, limits=(min(lengths), max(lengths)))
    y = Axis("sequences entirely correct, %", limits=(0, 100))
    return Chart(caption=caption, panels=shown, x=x, y=y, marks=(trained,))


def _known(lengths: Sequence[int], shares: Sequence[float | None]) -> list[Point]:
    return [(n, share) for n, share in zip(lengths, shares, strict=True) if share is not None]


def tracking_charts(results: Sequence[dict[str, Any]], scale: Scale) -> list[Chart]:
    """State tracking over length, a chart for every depth."""
    setting = tracking.SCALES[scale]
    charts = []
    for depth in setting.depths:
        panels = over_length(results, scale, depth)
        if panels:
            name = _DEPTHS.get(depth, f"{depth} blocks")
            charts.append(
                length_chart(
                    setting.test_lens,
                    panels,
                    setting.seq_len,
                    f"Sequences entirely correct over their length, {name}, median over seeds. "
                    f"Trained up to length {setting.seq_len}, which is marked.",
                )
            )
    return charts


def fewest_blocks(
    results: Sequence[dict[str, Any]], scale: Scale
) -> dict[str, list[int | None]] | None:
    """The fewest blocks that solve each length, by model; None if that is not known yet."""
    setting = tracking.SCALES[scale]
    task = "a5" if "a5" in setting.tasks else setting.tasks[0]
    found = {
        name: [
            tracking.fewest_blocks(results, setting, name, task, length)
            for length in setting.test_lens
        ]
        for name in setting.models
    }
    # A depth that has not run yet may solve a length: wait until all depths have results.
    fewest = {
        name: blocks
        for name, blocks in found.items()
        if None not in blocks
        or all(tracking.accuracies(results, name, task, n) for n in setting.depths)
    }
    return fewest or None


def scaling_charts(passes: Mapping[str, Any], shape: str) -> list[Chart]:
    """Time over sequence length, as ``kla bench scan`` measured it.

    Args:
        passes: times by kind of pass and engine.
        shape: shape of the tensors, for the caption.
    """
    panels, stopped = [], set()
    for kind, engines in passes.items():
        lines = []
        for engine, row in engines.items():
            points = sorted((float(T), 1e3 * s) for T, s in row["seconds"].items() if s > 0)
            if points:
                lines.append(Line(engine, points))
            if row["gave_up"]:
                stopped.add(engine)
        panels.append(Panel(kind, lines))
    why = f" {', '.join(sorted(stopped))} end where the next length would not fit." * bool(stopped)
    lengths = sorted({x for panel in panels for line in panel.lines for x, _ in line.points})
    if not lengths:
        return []
    some = {
        x: f"{x:,.0f}" if x < 1e4 else f"{x / 1024:.0f}k" for x in lengths[:: len(lengths) // 5 + 1]
    }
    return [
        Chart(
            caption=f"Time over sequence length, one line per implementation; {shape}.{why}",
            panels=panels,
            x=Axis("sequence length", base=2, ticks=some, limits=(lengths[0], lengths[-1])),
            y=Axis("milliseconds", base=10),
        )
    ]
