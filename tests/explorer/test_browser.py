"""The page in a browser: what it shows, what it does when asked, and that the keyboard suffices."""

import os
import shutil
import threading

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytest.importorskip("playwright", reason="playwright drives the browser: it is not installed")

from playwright import sync_api as playwright

from kalman_attention.evaluation.uncertainty import attention_maps
from kalman_attention.explorer.look import look, task_subject, text_subject
from kalman_attention.explorer.page import render
from kalman_attention.explorer.server import ExplorerServer
from kalman_attention.tasks.registry import make_task
from tests.evaluation.checkpoints import tokenizer
from tests.models.small import FILTERS, small

# One group: a browser per worker is one too many.
pytestmark = pytest.mark.xdist_group("browser")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NASTY = 'the filter <b id="bold">sees</b> <img src=x onerror="window.hit=1"> noisy\nvalues'


@pytest.fixture(scope="module")
def browser():
    """Chromium: the system's, or the one that playwright has fetched."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    with playwright.sync_playwright() as driver:
        try:
            found = driver.chromium.launch(
                executable_path=path, args=["--no-sandbox"] if root else []
            )
        except playwright.Error as error:
            pytest.skip(f"no Chromium to run: {str(error).splitlines()[0]}")
        yield found
        found.close()


def data(plan="attention + kla*2", text=NASTY, **kla):
    model = small(plan, vocab_size=300, kla=kla).eval()
    return model, look(model, text_subject(tokenizer(), text), title="tiny & <small>")


@pytest.fixture
def opened(browser, tmp_path):
    """A function that shows a page, and fails at its end if the page has complained."""
    complaints, contexts = [], []

    def show(found, width=1200, **options):
        path = tmp_path / "page.html"
        path.write_text(render(found), encoding="utf-8")
        return visit(path.as_uri(), width, **options)

    def visit(url, width=1200, **options):
        context = browser.new_context(viewport={"width": width, "height": 844}, **options)
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: r.url == url or complaints.append(f"asked for {r.url}"))
        page.goto(url)
        return page

    show.visit, show.complaints = visit, complaints
    yield show
    for context in contexts:
        context.close()
    assert not complaints


def tinted(page):
    return page.eval_on_selector_all(
        ".token", "all => all.map(node => Number(node.style.getPropertyValue('--t')))"
    )


def test_tokens_are_text_and_coloured(opened):
    _, found = data()
    page = opened(found)
    shown = page.eval_on_selector_all(".token", "all => all.map(node => node.innerText)")
    assert "".join(shown[1:]).replace("\u21b5", "") == NASTY
    assert page.locator("#text b, #text img").count() == 0
    assert page.evaluate("window.hit") is None
    assert page.inner_text("h1") == "tiny & <small>"
    values = np.array(found["scores"]["nll"][1:])
    colours = np.array(tinted(page)[1:])
    assert colours[values.argmax()] == 1.0
    assert colours[values.argmin()] == 0.0
    assert (np.diff(colours[values.argsort()]) >= 0).all()
    page.select_option("#score", "gain")
    gain = np.array(found["layers"][2]["gain"])
    assert (np.diff(np.array(tinted(page))[gain.argsort()]) >= 0).all()
    assert "replaced" in page.inner_text("#what")
    page.select_option("#layer", "0")
    assert "attention: it has no posterior" in hovered(page, 3)


def hovered(page, i):
    page.hover(f'.token[data-i="{i}"]')
    return page.inner_text("#panel")


def test_hover_shows_predictions_and_numbers(opened):
    _, found = data()
    said = hovered(opened(found), 4)
    assert f"token 4 of {len(found['tokens']) - 1}" in said
    assert f"{found['scores']['nll'][4]:.3g}" in said
    for name, probability in found["top"][4][:4]:
        assert name.strip().replace("\n", "\u21b5") in said
        assert f"{probability:.3g}" in said


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_the_page_runs_the_same_filter(opened, options):
    model, found = data(**options)
    ids = torch.tensor([tokenizer().encode(NASTY)])
    ids = torch.cat([torch.tensor([[tokenizer().bos]]), ids], 1)
    maps = attention_maps(model, ids, block=1, channels=[0, 5])[0]
    belief, last = model.uncertainty(ids), ids.shape[1] - 1
    page = opened(found)
    for c, d in enumerate((0, 5)):
        for t in (0, 3, last):
            weights = page.evaluate(f"Array.from(weightsOf(view.data.layers[1], {d}, {t}))")
            expected = maps[c, t, : t + 1]
            torch.testing.assert_close(torch.tensor(weights), expected, rtol=1e-3, atol=1e-5)
        run = page.evaluate(f"runFilter(view.data.layers[1], {d})")
        for name, expected in (("gain", belief.gain[1]), ("variance", belief.variance[1])):
            torch.testing.assert_close(
                torch.tensor(run[name]), expected[0, :, d], rtol=1e-3, atol=1e-5
            )


def test_click_shows_what_a_token_reads_from(opened):
    model, found = data()
    page = opened(found)
    page.click('.token[data-i="6"]')
    colours = tinted(page)
    assert max(colours) == 1.0
    assert not any(colours[7:])
    assert "Token 6 reads from" in page.inner_text("#panel")
    assert page.get_attribute('.token[data-i="6"]', "aria-pressed") == "true"
    assert page.locator("#panel .plot path").count() == 2
    page.fill("#channel", "5")
    ids = torch.tensor([[tokenizer().bos, *tokenizer().encode(NASTY)]])
    weights = attention_maps(model, ids, block=2, channels=[5])[0, 0, 6, :7]
    negative = page.eval_on_selector_all(
        ".token", "all => all.map(node => node.classList.contains('negative'))"
    )
    assert negative[:7] == (weights < 0).tolist()
    expected = weights.abs() / weights.abs().max()
    torch.testing.assert_close(torch.tensor(tinted(page)[:7]), expected, rtol=0.0, atol=2e-3)
    page.click('.token[data-i="6"]')
    assert "Token 6 reads from" not in page.inner_text("#panel")


def test_the_keyboard_suffices(opened):
    _, found = data()
    page = opened(found)
    page.focus("#channel")
    page.keyboard.press("Tab")
    here = "document.activeElement.dataset.i"
    assert page.evaluate(here) == "0"
    for key, place in [("ArrowRight", "1"), ("ArrowRight", "2"), ("ArrowLeft", "1")]:
        page.keyboard.press(key)
        assert page.evaluate(here) == place
    assert "token 1 of" in page.inner_text("#panel")
    top = "document.activeElement.getBoundingClientRect().top"
    first = page.evaluate(top)
    page.keyboard.press("ArrowDown")  # the text has a line break
    assert page.evaluate(top) > first
    page.keyboard.press("ArrowUp")
    assert abs(page.evaluate(top) - first) < 5  # start of text is smaller
    page.keyboard.press("End")
    assert page.evaluate(here) == str(len(found["tokens"]) - 1)
    page.keyboard.press("Enter")
    assert "Token" in page.inner_text("#panel h2 >> nth=1")
    assert page.inner_text("#status").startswith("Token")
    page.keyboard.press("Escape")
    assert page.locator(".pinned, .after").count() == 0
    label = page.get_attribute('.token[data-i="2"]', "aria-label")
    assert label.startswith("2: ")
    assert "surprise" in label


@pytest.mark.parametrize("width", [390, 1200])
def test_fits_and_opens_on_any_screen(opened, width):
    _, found = data(text="the filter sees noisy values " * 12)
    page = opened(found, width, has_touch=width == 390)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    last = page.locator(".token").last
    last.tap() if width == 390 else last.click()
    assert f"Token {len(found['tokens']) - 1} reads from" in page.inner_text("#panel")
    token, sheet = last.bounding_box(), page.locator("#panel").bounding_box()
    if width == 390:
        assert token["y"] + token["height"] <= sheet["y"]  # the panel does not hide its token
    page.click("#panel button")
    assert page.locator(".pinned").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_every_colour(opened, scheme):
    page = opened(data()[1], color_scheme=scheme)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    ratio = """() => {
      const context = document.createElement("canvas").getContext("2d");
      const light = (name) => {
        const style = getComputedStyle(document.documentElement);
        context.fillStyle = style.getPropertyValue(name).trim();
        context.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((x) => x / 255)
          .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const against = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const pairs = [["--ink", "--hot"], ["--ink", "--cold"], ["--ink", "--paper"],
        ["--muted", "--paper"], ["--muted", "--card"], ["--accent", "--paper"]];
      return Object.fromEntries(pairs.map(([a, b]) => [a + b, against(light(a), light(b))]));
    }"""
    assert {k: v for k, v in page.evaluate(ratio).items() if v < 4.5} == {}
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_models_without_a_belief_say_so(opened):
    page = opened(data("attention")[1])
    assert page.eval_on_selector_all("#score option", "all => all.map(o => o.value)") == [
        *("nll", "entropy", "max_prob")
    ]
    assert page.is_disabled("#channel")
    assert "No layer of this model is KLA" in hovered(page, 2)


def test_a_task_is_shown_where_it_asks(opened):
    task = make_task("recall", **make_task("recall").SHORT)
    model = small("kla", vocab_size=task.vocab_size).eval()
    found = look(model, task_subject(task, "recall"), title="recall")
    page = opened(found)
    asked = [i for i, name in enumerate(found["wanted"]) if name is not None]
    assert page.locator(".asked").count() == len(asked)
    assert "Predicted after it" in hovered(page, asked[0])


def test_live(opened):
    model, _ = data()

    def read(text):
        if not text.strip():
            raise ValueError("the text is empty: enter some text.")
        return look(model, text_subject(tokenizer(), text), title="live")

    with ExplorerServer(render({**read("the"), "text": "the"}, live=True), read) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            page = opened.visit(server.url)
            page.fill("#typed", NASTY)
            page.keyboard.press("Control+Enter")
            page.wait_for_selector('.token[data-i="9"]')
            shown = page.eval_on_selector_all(".token", "all => all.map(node => node.innerText)")
            assert "".join(shown[1:]).replace("\u21b5", "") == NASTY
            assert page.locator("#text img").count() == 0
            page.fill("#typed", " ")
            page.click("#live button")
            playwright.expect(page.locator("#problem")).to_contain_text("enter some text")
        finally:
            server.shutdown()
            thread.join()
    expected = [f"asked for {server.url}look"] * 2
    told = [text for text in opened.complaints if text not in expected]
    assert all("422" in text for text in told)  # the browser's note on the refused text
    opened.complaints.clear()
