"""What is on a page, and that nothing in it does what a result says."""

import html.parser
import re

import pytest

pytest.importorskip("jinja2")

from kalman_attention._tables import Table
from kalman_attention.report.charts import Axis, Chart, Line, Panel
from kalman_attention.report.page import Section, Shown, Verdict, render_page, write_page

VOID = ("meta", "link", "img")
HOSTILE = "</title></script><script>alert('x')</script><img src=x onerror=alert(1)>\"'&"


class Links(html.parser.HTMLParser):
    """Collects everything a page refers to, its anchors, its text, and tags left open."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.anchors: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.references += [found[k] for k in ("href", "src") if k in found]
        self.anchors += [found["id"]] if "id" in found else []
        self.attributes += found
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(page: str) -> Links:
    links = Links()
    links.feed(page)
    assert not links.open
    assert len(links.anchors) == len(set(links.anchors)), "every anchor is there once"
    for reference in links.references:
        assert reference[0] == "#" or reference.startswith("data:"), "the page needs nothing else"
        assert reference[0] != "#" or reference[1:] in links.anchors, "every link is alive"
    return links


def chart(name="kla", variant=""):
    lines = [Line(name, [(1.0, 2.0), (2.0, 3.0)], variant)]
    panels = [Panel("left", lines), Panel("right", lines)]
    return Chart(caption="Caption.", panels=panels, x=Axis("updates"), y=Axis("loss"))


def page(*sections, verdicts=()):
    return render_page("Title", "Lead.", sections, verdicts)


def test_everything_from_results_is_escaped(tmp_path):
    picture = tmp_path / "a.svg"
    picture.write_text(f"<svg>{HOSTILE}</svg>")
    hostile = Section(
        name=HOSTILE,
        title=HOSTILE,
        text=HOSTILE,
        source=HOSTILE,
        scale=HOSTILE,
        command=HOSTILE,
        tables=[Table(HOSTILE, [HOSTILE, "n"], [[HOSTILE, "1 (2)"], ["b", HOSTILE]], [HOSTILE])],
        charts=[
            Chart(
                caption=HOSTILE,
                panels=[Panel(HOSTILE, [Line(HOSTILE, [(0, 1), (1, 2)], HOSTILE)])],
                x=Axis(HOSTILE, ticks={0.0: HOSTILE, 1.0: HOSTILE}),
                y=Axis(HOSTILE),
            )
        ],
        images=[(picture, HOSTILE)],
    )
    verdict = Verdict(
        claim=HOSTILE,
        verdict="open",
        scale=HOSTILE,
        evidence=HOSTILE,
        paper=HOSTILE,
        experiments=(HOSTILE,),
    )
    links = parsed(page(hostile, verdicts=[verdict]))
    assert links.tags.count("script") == 1  # ours
    assert links.tags.count("img") == 1  # the picture, as data
    assert not [name for name in links.attributes if name.startswith("on")]


def test_only_our_script_may_run():
    source = page()
    (script,) = re.findall(r"<script>(.*?)</script>", source, re.DOTALL)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', source)
    import base64
    import hashlib

    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in policy or f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_a_note_of_all_tables_stands_once():
    tables = [
        Table("first", ["a"], [["1"]], ["scale cpu", "common", "alone"]),
        Table("second", ["a"], [["1"]], ["scale cpu", "common"]),
    ]
    section = Section(name="x", title="X", scale="cpu", tables=tables)
    assert section.notes == ["common"]
    assert [shown.notes for shown in section.shown] == [["alone"], []]
    assert page(section).count("common") == 1
    assert Section(name="x", title="X").notes == []


def test_long_tables_after_the_first_are_folded():
    def table(rows):
        return Table("t", ["a"], [["1"]] * rows)

    few = Section(name="x", title="X", tables=[table(9), table(4), table(5)])
    assert [shown.open for shown in few.shown] == [True, True, False]
    many = Section(name="x", title="X", tables=[table(9)] * 5)
    assert [shown.open for shown in many.shown] == [False] * 5
    assert page(many).count("<details>") == 5


@pytest.mark.parametrize(
    ("cell", "text", "aside", "key"),
    [
        ("43.1 (85.0)", "43.1", "(85.0)", "43.1"),
        ("- (85.0)", "\N{EN DASH}", "(85.0)", ""),
        ("-", "\N{EN DASH}", "", ""),
        ("24 / 81", "24 / 81", "", "24"),
        ("- / -", "\N{EN DASH} / \N{EN DASH}", "", ""),
        ("> 4", "> 4", "", "4.000001"),
        ("5 of 5", "5 of 5", "", "5"),
        ("10,002,432", "10,002,432", "", "10002432"),
        ("-6.6 (-12.1)", "-6.6", "(-12.1)", "-6.6"),
        ("3e-3", "3e-3", "", "0.003"),
    ],
)
def test_cells_are_sorted_by_their_first_number(cell, text, aside, key):
    shown = Shown(Table("t", ["model", "n"], [["kla", cell], ["b", "7"]]), "t", [], True)
    assert shown.numeric == [False, True]
    assert shown.rows[0][1][1] == (text, aside, key)


def test_names_are_for_people_and_kla_stands_out():
    rows = [["gated_deltanet", "1"], ["kla-micro", "2"], ["mamba, norm", "3"]]
    shown = Shown(Table("t", ["model", "n"], rows), "t", [], True)
    assert [cells[0].text for _, cells in shown.rows] == [
        "Gated DeltaNet",
        "KLA micro",
        "Mamba, norm",
    ]
    assert [own for own, _ in shown.rows] == [False, True, False]
    only = Shown(Table("t", ["model", "n"], [["kla", "1"]]), "t", [], True)
    assert not only.rows[0][0]  # from what should it stand out?


def test_verdicts_lead_to_what_they_rest_on():
    verdicts = [
        Verdict(claim="c", verdict=word, scale="s", evidence="e", paper="fig:scaling",
                experiments=("mad", "absent"))
        for word in ("open", "refuted", "confirmed", "open")
    ]  # fmt: skip
    source = page(Section(name="mad", title="MAD", scale="cpu"), verdicts=verdicts)
    parsed(source)
    assert source.count('href="#mad-cpu"') == 1 + len(verdicts)
    assert "figure 4 of the paper" in source
    assert re.findall(r'<p class="badge">(\w+)', source) == ["confirmed", "refuted", "open", "open"]
    assert "<b>2</b> open" in source


def test_labels_of_the_latex_are_not_shown():
    source = page(
        Section(name="a5", title="A5", source="related to fig:a5-min-layers", scale="cpu")
    )
    assert "paper: related to figure 1a" in source
    assert "fig:" not in source


def test_a_page_is_written_whole(tmp_path):
    path = tmp_path / "new" / "page.html"
    write_page(path, "Lead.", [Section(name="x", title="X", charts=[chart(variant="rate")])])
    source = path.read_text(encoding="utf-8")
    assert source.startswith("<!doctype html>")
    parsed(source)
    assert source.count('class="plot"') == 2
