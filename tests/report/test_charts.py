"""Charts as geometry: where points, ticks and colours come to stand."""

import re

import pytest

from kalman_attention.report.charts import (
    COLOURS,
    DASHES,
    Axis,
    Chart,
    Line,
    Panel,
    colours,
    proper_name,
)
from kalman_attention.report.page import TEMPLATES


def chart(*lines, x=None, y=None, **options):
    panels = [Panel("", lines)]
    return Chart(caption="", panels=panels, x=x or Axis("x"), y=y or Axis("y"), **options)


def places(path: str) -> list[tuple[float, float]]:
    return [tuple(map(float, place.split())) for place in re.split("[ML]", path)[1:]]


def test_points_lie_where_the_axes_say():
    drawing = chart(Line("a", [(0, 0), (5, 5), (10, 10)]), y=Axis("y", limits=(0, 20)))
    (plot,) = drawing.drawn()
    assert places(plot.strokes[0].path) == [(0, 100), (50, 75), (100, 50)]
    assert plot.x_ticks == [(0, "0"), (20, "2"), (40, "4"), (60, "6"), (80, "8"), (100, "10")]
    assert plot.y_ticks[-1] == (0, "20")


def test_logarithms():
    y = Axis("y", base=10)
    (plot,) = chart(Line("a", [(1, 1), (2, 1000)]), y=y).drawn()
    assert [label for _, label in plot.y_ticks] == ["1", "10", "100", "1,000"]
    assert [top for top, _ in plot.y_ticks] == pytest.approx([100, 200 / 3, 100 / 3, 0])


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1.87, 2.34, ["1.8", "1.9", "2.0", "2.1", "2.2", "2.3", "2.4"]),
        (0, 1250, ["0", "250", "500", "750", "1,000", "1,250"]),
        (0.0012, 0.0049, ["0.001", "0.002", "0.003", "0.004", "0.005"]),
        (-1, 1, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
    ],
)
def test_ticks_are_round_and_alike(low, high, labels):
    (plot,) = chart(Line("a", [(0, low), (1, high)])).drawn()
    assert [label for _, label in plot.y_ticks] == labels


def test_a_single_point_and_no_point_can_be_drawn():
    (plot,) = chart(Line("a", [(3, 7)])).drawn()
    assert places(plot.strokes[0].path) == [(50, 50)]
    assert plot.x_ticks
    (empty,) = chart().drawn()
    assert empty.strokes == []


def test_panels_share_the_vertical_scale_only():
    panels = [Panel("a", [Line("m", [(0, 0), (1, 10)])]), Panel("b", [Line("m", [(0, 5), (9, 5)])])]
    first, second = Chart(caption="", panels=panels, x=Axis("x"), y=Axis("y")).drawn()
    assert first.y_ticks == second.y_ticks
    assert places(second.strokes[0].path) == [(0, 50), (100, 50)]


def test_dots_only_where_they_can_be_told_apart():
    few, many = ([(i, i) for i in range(n)] for n in (3, 40))
    (plot,) = chart(Line("a", few), Line("b", many), Line("c", many, joined=False)).drawn()
    assert [stroke.dots.count("M") for stroke in plot.strokes] == [3, 0, 40]
    assert plot.strokes[2].path == ""
    (crowded,) = chart(*(Line(str(i), few) for i in range(9))).drawn()
    assert not any(stroke.dots for stroke in crowded.strokes)


def test_a_band_goes_there_and_back():
    panel = Panel("", [Line("a", [(0, 0), (1, 10)])], [(0, 0, 5), (1, 5, 10)])
    (plot,) = Chart(caption="", panels=[panel], x=Axis("x"), y=Axis("y")).drawn()
    assert plot.band == "0.00,50.00 100.00,0.00 100.00,50.00 0.00,100.00"


def test_marks_outside_are_left_out():
    (plot,) = chart(Line("a", [(0, 0), (10, 1)]), marks=(5, 11)).drawn()
    assert plot.marks == [50]


def test_a_model_has_one_colour_everywhere():
    assert colours(["kla", "mamba"])["kla"] == colours(["gla", "KLA-micro"])["KLA-micro"]
    assert colours(["gated_deltanet"]) == {"gated_deltanet": colours(["gdn"])["gdn"]}
    mixed = colours(["kla", "shared 4", "kla, norm", "mamba"])
    assert len(set(mixed.values())) == 4
    assert set(colours(map(str, range(30))).values()) == set(range(COLOURS))


def test_the_style_sheet_has_every_colour_and_dash():
    style = (TEMPLATES / "page.css").read_text()
    for i in range(COLOURS):
        assert f".c{i} {{ stroke: var(--c{i}); }}" in style
        assert style.count(f"--c{i}: #") == 2  # light and dark
    for i in range(1, DASHES):
        assert f".d{i} {{" in style


def test_names_for_people():
    assert proper_name("gpt+kla-micro") == "GPT+KLA micro"
    assert proper_name("kla-text-micro") == "KLA-text micro"
    assert proper_name("kla,p=0") == "KLA, p=0"
    assert proper_name("shared 4, rotating") == "shared 4, rotating"
