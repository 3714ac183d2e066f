"""Line charts as plain geometry, for a template that draws them as vector graphics.

A plot is a square of 100 by 100 that the page stretches to any size. Labels are outside it, in the
font of the page: they stay readable on a phone and follow the colours of the page.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Point = tuple[float, float]


class Axis(NamedTuple):
    """One axis of a chart.

    Attributes:
        label: the quantity, with its unit.
        base: base of the logarithm; None for a linear axis.
        ticks: labels by value; None chooses round numbers.
        limits: the ends of the axis; None for those of the points.
    """

    label: str
    base: int | None = None
    ticks: Mapping[float, str] | None = None
    limits: tuple[float, float] | None = None


class Line(NamedTuple):
    """Points of one model in one setting.

    Attributes:
        name: name of the model, which has the same colour in every chart of a page.
        points: pairs (x, y), in the order in which they are joined.
        variant: variant of the model, such as its learning rate, shown by a dash pattern.
        joined: False draws only the points.
    """

    name: str
    points: Sequence[Point]
    variant: str = ""
    joined: bool = True


class Panel(NamedTuple):
    """One of several plots that share a legend.

    Attributes:
        title: title above the plot.
        lines: lines of the plot.
        band: area behind the lines, triples (x, lower, upper).
    """

    title: str
    lines: Sequence[Line]
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Plots side by side with a shared vertical scale and legend.

    Attributes:
        caption: caption below the plots.
        panels: the plots.
        x: the horizontal axis.
        y: the vertical axis.
        marks: values of x to mark.
    """

    caption: str
    panels: Sequence[Panel]
    x: Axis
    y: Axis
    marks: Sequence[float] = ()

    @property
    def lines(self) -> list[Line]:
        """The lines of all panels."""
        return [line for panel in self.panels for line in panel.lines]

    @property
    def names(self) -> list[str]:
        """Names in the legend of colours."""
        return [*dict.fromkeys(line.name for line in self.lines)]

    @property
    def colours(self) -> dict[str, int]:
        """Colour numbers by name."""
        return colours(self.names)

    @property
    def variants(self) -> list[str]:
        """Variants in the legend of dash patterns."""
        return [*dict.fromkeys(line.variant for line in self.lines)]

    def drawn(self) -> list["Plot"]:
        """The panels as geometry."""
        return [_plot(self, panel) for panel in self.panels]


class Stroke(NamedTuple):
    """A line as it is drawn.

    Attributes:
        line: the line.
        colour: number of its colour.
        dash: number of its dash pattern.
        path: data of an SVG ``path`` element.
        dots: another path, with a dot at every point; empty if there are too many to distinguish.
    """

    line: Line
    colour: int
    dash: int
    path: str
    dots: str


class Plot(NamedTuple):
    """A panel as it is drawn, with positions in percent of its width and height.

    Attributes:
        title: title above the plot.
        strokes: its lines.
        band: corners of the area behind them.
        x_ticks: positions from the left, with labels.
        y_ticks: positions from the top, with labels.
        marks: positions of vertical lines.
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
    "kla-text": (3, "KLA-text"),
    "kla+": (4, "KLA+"),
    "gpt+kla": (4, "GPT+KLA"),
    "mlstm": (5, "mLSTM"),
    "mamba-norm": (5, "Mamba-norm"),
    "attention": (6, "attention"),
    "gpt": (6, "GPT"),
    "rotating-kla": (7, "rotating KLA"),
    "lstm": (8, "LSTM"),
    "gated-deltanet-negative": (9, "Gated DeltaNet, negative eigenvalues"),
}
"""Models by their name in results: colour number and display name."""
_SIZES = ("nano", "micro", "small", "45m", "180m")
COLOURS = 10
"""Number of colours in the style sheet."""
DASHES = 4
"""Number of dash patterns in the style sheet."""
_MOST_DOTS = 24  # more dots per line would merge in a plot of 300 pixels
_MOST_DOTTED = 8  # dots on more lines would hide each other


def colours(names: Iterable[str]) -> dict[str, int]:
    """A colour number for every name: fixed for known models, the next free one for others."""
    known = {
        name: None if "," in name else _MODELS.get(_model(name)[0], (None,))[0] for name in names
    }
    free = [i for i in range(COLOURS) if i not in known.values()] or [*range(COLOURS)]
    others = [name for name, colour in known.items() if colour is None]
    chosen = {name: free[i % len(free)] for i, name in enumerate(others)}
    return {name: chosen[name] if colour is None else colour for name, colour in known.items()}


def proper_name(name: str) -> str:
    """The display name of a model, with its size and options; other names are unchanged."""
    head, comma, options = name.partition(",")
    model, size = _model(head)
    if model not in _MODELS:
        return name
    return f"{_MODELS[model][1]} {size}".rstrip() + (f", {options.strip()}" if comma else "")


def _model(name: str) -> tuple[str, str]:
    """The model and the size in a name, such as kla and micro in kla-micro."""
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
    # A line of zero length with round ends is a dot that stays round in a stretched plot.
    marked = not line.joined or (dotted and len(places) <= _MOST_DOTS)
    return path, "".join(f"M{place}h0" for place in places) if marked else ""


def _band(band: Sequence[tuple[float, float, float]], x: "_Scale", y: "_Scale") -> str:
    there = [(a, upper) for a, _, upper in band]
    back = [(a, lower) for a, lower, _ in reversed(band)]
    return " ".join(f"{x.place(a):.2f},{100 - y.place(b):.2f}" for a, b in there + back)


class _Scale:
    """Positions of values between the ends of an axis.

    Args:
        axis: the axis.
        values: values that it has to show.
        outward: whether it extends to round numbers beyond the values.
    """

    def __init__(self, axis: Axis, values: Sequence[float], *, outward: bool) -> None:
        self._base = axis.base
        low, high = axis.limits or (min(values, default=0.0), max(values, default=1.0))
        free = axis.limits is None and axis.base is None
        if free and not outward and 0 < low < high / 4:
            low = 0.0  # values that begin near 0, as counts do: show the origin
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
    """Multiples of a round step, from the last one below the values to the first one above."""
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
