"""Line charts as plain geometry: what a template needs to draw them as vector graphics.

A plot is a square of 100 by 100 that the page stretches to any size, with labels outside it in
the page's own letters: they stay readable on a telephone and follow the colours of the page.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Point = tuple[float, float]


class Axis(NamedTuple):
    """One direction of a chart.

    Attributes:
        label: what it shows, with its unit.
        base: of the logarithm; None for an axis of equal steps.
        ticks: where to write what; None chooses round numbers.
        limits: the ends; None takes those of the points.
    """

    label: str
    base: int | None = None
    ticks: Mapping[float, str] | None = None
    limits: tuple[float, float] | None = None


class Line(NamedTuple):
    """Points of one model in one setting.

    Attributes:
        name: of the model; the same colour in every chart of a page.
        points: pairs (x, y), in the order in which they are joined.
        variant: of the model, such as its learning rate; a dash pattern.
        joined: False draws only the points.
    """

    name: str
    points: Sequence[Point]
    variant: str = ""
    joined: bool = True


class Panel(NamedTuple):
    """One plot out of several that share a legend.

    Attributes:
        title: above it.
        lines: in it.
        band: an area behind the lines, triples (x, lower, upper).
    """

    title: str
    lines: Sequence[Line]
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Plots side by side on one vertical scale, with one legend.

    Attributes:
        caption: below.
        panels: the plots.
        x: the horizontal axis.
        y: the vertical axis.
        marks: values of x to point out.
    """

    caption: str
    panels: Sequence[Panel]
    x: Axis
    y: Axis
    marks: Sequence[float] = ()

    @property
    def lines(self) -> list[Line]:
        """Those of all panels."""
        return [line for panel in self.panels for line in panel.lines]

    @property
    def names(self) -> list[str]:
        """What the colours stand for."""
        return [*dict.fromkeys(line.name for line in self.lines)]

    @property
    def colours(self) -> dict[str, int]:
        """Names to numbers of colours."""
        return colours(self.names)

    @property
    def variants(self) -> list[str]:
        """What the dashes stand for."""
        return [*dict.fromkeys(line.variant for line in self.lines)]

    def drawn(self) -> list["Plot"]:
        """The panels as geometry."""
        return [_plot(self, panel) for panel in self.panels]


class Stroke(NamedTuple):
    """A line as it is drawn.

    Attributes:
        line: what it shows.
        colour: number of its colour.
        dash: number of its pattern.
        path: of an SVG element ``path``.
        dots: another path, a dot at every point; empty if there are too many to be told apart.
    """

    line: Line
    colour: int
    dash: int
    path: str
    dots: str


class Plot(NamedTuple):
    """A panel as it is drawn, all places in percent of its width and height.

    Attributes:
        title: above it.
        strokes: its lines.
        band: corners of the area behind them.
        x_ticks: places from the left, with labels.
        y_ticks: places from the top.
        marks: places of vertical lines.
    """

    title: str
    strokes: list[Stroke]
    band: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    marks: list[float]


_MODELS = {
    "kla": (0, "KLA"),
    "mamba": (1, "Mamba"),
    "gated-deltanet": (2, "Gated DeltaNet"),
    "gdn": (2, "Gated DeltaNet"),
    "gla": (3, "GLA"),
    "kla+": (4, "KLA+"),
    "gpt+kla": (4, "GPT+KLA"),
    "mlstm": (5, "mLSTM"),
    "attention": (6, "attention"),
    "gpt": (6, "GPT"),
    "rotating-kla": (7, "rotating KLA"),
    "lstm": (8, "LSTM"),
    "gated-deltanet-negative": (9, "Gated DeltaNet, negative eigenvalues"),
}
"""What models are called in results: their colour, and their name for people."""
_SIZES = ("nano", "micro", "small", "45m", "180m")
COLOURS = 10
"""How many the style sheet has."""
DASHES = 4
"""How many patterns the style sheet has."""
_MOST_DOTS = 24  # further ones run together in a plot of 300 pixels
_MOST_DOTTED = 8  # lines; dots on more of them hide each other


def colours(names: Iterable[str]) -> dict[str, int]:
    """A number for every name: that of its model everywhere, and free ones for other names."""
    known = {
        name: None if "," in name else _MODELS.get(_model(name)[0], (None,))[0] for name in names
    }
    free = [i for i in range(COLOURS) if i not in known.values()] or [*range(COLOURS)]
    others = [name for name, colour in known.items() if colour is None]
    chosen = {name: free[i % len(free)] for i, name in enumerate(others)}
    return {name: chosen[name] if colour is None else colour for name, colour in known.items()}


def proper_name(name: str) -> str:
    """A model by its name for people, with its size and options; any other name as it is."""
    head, comma, options = name.partition(",")
    model, size = _model(head)
    if model not in _MODELS:
        return name
    return f"{_MODELS[model][1]} {size}".rstrip() + (f", {options.strip()}" if comma else "")


def _model(name: str) -> tuple[str, str]:
    """The model that a name speaks of, and its size: kla-micro is a kla."""
    plain = name.lower().replace("_", "-").replace(" ", "-")
    stem, _, size = plain.rpartition("-")
    return (stem, size) if size in _SIZES else (plain, "")


def _plot(chart: Chart, panel: Panel) -> Plot:
    x = _Scale(chart.x, [p[0] for line in panel.lines for p in line.points], outward=False)
    shown = [p[1] for line in chart.lines for p in line.points]
    shown += [edge for each in chart.panels for _, *edges in each.band for edge in edges]
    y = _Scale(chart.y, shown, outward=True)
    dotted = len(panel.lines) <= _MOST_DOTTED
    strokes = [
        Stroke(
            line,
            chart.colours[line.name],
            chart.variants.index(line.variant) % DASHES,
            *_paths(line, x, y, dotted),
        )
        for line in panel.lines
    ]
    return Plot(
        title=panel.title,
        strokes=strokes,
        band=_band(panel.band, x, y),
        x_ticks=[(x.place(value), label) for value, label in x.ticks.items()],
        y_ticks=[(100 - y.place(value), label) for value, label in y.ticks.items()],
        marks=[place for value in chart.marks if 0 <= (place := x.place(value)) <= 100],
    )


def _paths(line: Line, x: "_Scale", y: "_Scale", dotted: bool) -> tuple[str, str]:
    places = [f"{x.place(a):.2f} {100 - y.place(b):.2f}" for a, b in line.points]
    path = f"M{'L'.join(places)}" if line.joined else ""
    # A line of no length with round ends is a dot, and stays round in a stretched plot.
    marked = not line.joined or (dotted and len(places) <= _MOST_DOTS)
    return path, "".join(f"M{place}h0" for place in places) if marked else ""


def _band(band: Sequence[tuple[float, float, float]], x: "_Scale", y: "_Scale") -> str:
    there = [(a, upper) for a, _, upper in band]
    back = [(a, lower) for a, lower, _ in reversed(band)]
    return " ".join(f"{x.place(a):.2f},{100 - y.place(b):.2f}" for a, b in there + back)


class _Scale:
    """Where values lie between the ends of an axis.

    Args:
        axis: what is known of it.
        values: that it has to show.
        outward: whether it ends at round numbers, beyond the values.
    """

    def __init__(self, axis: Axis, values: Sequence[float], *, outward: bool) -> None:
        self._base = axis.base
        low, high = axis.limits or (min(values, default=0.0), max(values, default=1.0))
        free = axis.limits is None and axis.base is None
        if free and not outward and 0 < low < high / 4:
            low = 0.0  # what is counted begins at nothing
        ticks = axis.ticks
        if ticks is None:
            ticks = _powers(low, high, axis.base) if axis.base else _round_numbers(low, high)
        if free and outward:
            low, high = min(low, *ticks), max(high, *ticks)
        self.ticks = {value: label for value, label in ticks.items() if low <= value <= high}
        self._low, self._high = self._position(low), self._position(high)

    def _position(self, value: float) -> float:
        return value if self._base is None else math.log(value, self._base)

    def place(self, value: float) -> float:
        """In percent."""
        length = self._high - self._low
        return 100 * (self._position(value) - self._low) / length if length else 50.0


def _round_numbers(low: float, high: float, most: int = 5) -> dict[float, str]:
    """Multiples of a round step, from the last at or below the values to the first above them."""
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / most
    decade = 10.0 ** math.floor(math.log10(rough))
    step = next(s * decade for s in (1, 2, 2.5, 5, 10) if s * decade >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = next(d for d in range(20) if math.isclose(round(step, d), step, rel_tol=1e-6))
    return {(value := i * step): f"{value + 0.0:,.{digits}f}" for i in range(first, last + 1)}


def _powers(low: float, high: float, base: int) -> dict[float, str]:
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    return {(value := float(base) ** i): f"{value:,.10g}" for i in range(first, last + 1)}
