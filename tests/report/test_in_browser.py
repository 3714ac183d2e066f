"""The page of results in a browser: it sorts, fits, tells values, and runs nothing but its own."""

import pytest

pytest.importorskip("jinja2")

from kalman_attention._tables import Table
from kalman_attention.report.charts import Axis, Chart, Line, Panel
from kalman_attention.report.collect import collect, read_verdicts
from kalman_attention.report.page import Section, Verdict, write_page
from tests.browser import overflow
from tests.docs.markdown import ROOT

RESULTS = ROOT / "results"
SCRIPT = "</script><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def results_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(path, "Lead.", collect(RESULTS), read_verdicts(RESULTS))
    return path


@pytest.fixture(scope="module")
def small_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "small.html"
    rows = [["b", "9.5 (10.0)"], ["kla", "-"], ["c", "10.1"], ["a", "> 2"]]
    lines = [Line("kla", [(0, 1), (10, 3)], SCRIPT), Line(SCRIPT, [(0, 2), (10, 5)])]
    chart = Chart(
        caption=SCRIPT, panels=[Panel(SCRIPT, lines)], x=Axis("updates"), y=Axis("accuracy, %")
    )
    section = Section(
        name="s",
        title=SCRIPT,
        text=SCRIPT,
        tables=[Table(SCRIPT, ["model", "score"], rows, [SCRIPT])],
        charts=[chart],
    )
    verdict = Verdict(
        claim=SCRIPT,
        verdict="open",
        scale=SCRIPT,
        evidence=SCRIPT,
        paper=SCRIPT,
        experiments=("s",),
    )
    write_page(path, SCRIPT, [section], [verdict])
    return path


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_without_complaints(results_page, open_page, dark):
    page, complaints = open_page(results_page, dark=dark)
    page.locator("details").evaluate_all("all => all.forEach(each => { each.open = true; })")
    for width in (1200, 768, 390, 320):
        page.set_viewport_size({"width": width, "height": 800})
        assert overflow(page) == 0, width
    assert complaints == []


def test_wide_tables_scroll_in_their_own_box(results_page, open_page):
    page, _ = open_page(results_page, width=390)
    wide = "boxes => boxes.filter(box => box.scrollWidth > box.clientWidth).length"
    assert page.locator(".scroll").evaluate_all(wide) > 3


def first_column(page):
    return [text.strip() for text in page.locator("tbody tr > :first-child").all_inner_texts()]


def test_a_click_sorts(small_page, open_page):
    page, complaints = open_page(small_page)
    assert first_column(page) == ["b", "KLA", "c", "a"]
    model, score = page.locator("thead th").all()
    score.locator("button").click()
    assert first_column(page) == ["c", "b", "a", "KLA"]  # what is missing comes last
    assert score.get_attribute("aria-sort") == "descending"
    score.locator("button").click()
    assert first_column(page) == ["a", "b", "c", "KLA"]
    assert score.get_attribute("aria-sort") == "ascending"
    model.locator("button").click()
    assert first_column(page) == ["a", "b", "c", "KLA"]
    assert [head.get_attribute("aria-sort") for head in (model, score)] == ["ascending", "none"]
    assert complaints == []


def test_a_key_sorts(small_page, open_page):
    page, _ = open_page(small_page)
    page.locator("thead button").nth(1).focus()
    page.keyboard.press("Enter")
    assert first_column(page) == ["c", "b", "a", "KLA"]
    page.keyboard.press("Space")
    assert first_column(page) == ["a", "b", "c", "KLA"]


def test_the_pointer_and_the_arrow_keys_tell_values(small_page, open_page):
    page, complaints = open_page(small_page)
    plot = page.locator(".plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 1)
    told = page.locator(".tip").inner_text()
    assert told.startswith("10 updates")
    assert told.index("5") < told.index("KLA")  # the larger first
    page.mouse.move(0, 0)
    assert page.locator(".tip").count() == 0
    plot.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".tip").inner_text().startswith("0 updates")
    page.keyboard.press("ArrowRight")
    assert page.locator(".tip").inner_text().startswith("10 updates")
    page.keyboard.press("Escape")
    assert page.locator(".tip").count() == 0
    assert complaints == []


def test_values_stay_in_the_window(results_page, open_page):
    page, _ = open_page(results_page, width=390)
    for plot in page.locator(".plot").all()[:2]:
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        for share in (0.02, 0.5, 0.98):
            page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
            tip = page.locator(".tip").bounding_box()
            assert tip["x"] >= 0
            assert tip["x"] + tip["width"] <= 390
            assert overflow(page) == 0


def test_markup_in_results_does_nothing(small_page, open_page):
    page, complaints = open_page(small_page)
    assert page.title() == "Kalman linear attention"
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    plot = page.locator(".plot")
    plot.focus()
    page.keyboard.press("ArrowRight")
    assert SCRIPT in page.locator(".tip").inner_text()
    assert page.locator("img").count() == 0
    assert page.title() == "Kalman linear attention"
    assert complaints == []


def test_a_foreign_script_would_not_run(small_page, open_page, tmp_path):
    # What if escaping failed: the policy of the page stands behind it.
    broken = tmp_path / "broken.html"
    source = small_page.read_text(encoding="utf-8")
    broken.write_text(source.replace("</main>", f"{SCRIPT}</main>"), encoding="utf-8")
    page, complaints = open_page(broken)
    assert page.title() == "Kalman linear attention"
    assert any("Content Security Policy" in complaint for complaint in complaints)


def test_colours_follow_the_system(small_page, open_page):
    def brightness(dark):
        page, _ = open_page(small_page, dark=dark)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour.strip("rgb()").split(","))

    assert brightness(False) > 700
    assert brightness(True) < 100
