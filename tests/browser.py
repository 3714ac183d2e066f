"""Pages in a headless Chromium. Tests that need one skip, with a reason, where there is none.

A test asks for the fixture ``open_page``, which ``tests/conftest.py`` makes known everywhere.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL = "`pip install playwright`, and `apt install chromium` or `playwright install chromium`"


class Opened(NamedTuple):
    """A page in the browser.

    Attributes:
        page: playwright's.
        complaints: errors and warnings of the console, exceptions of scripts, and addresses other
            than its own that the page asked for. It grows while the page is used.
    """

    page: "Page"
    complaints: list[str]


def find_program(playwright: "Playwright") -> str:
    """Where a Chromium is: the system's, or the one that playwright has installed."""
    own = playwright.chromium.executable_path
    found = [path for name in PROGRAMS if (path := shutil.which(name))]
    found += [own] if Path(own).exists() else []
    if not found:
        pytest.skip(f"no Chromium here: {INSTALL}")
    return found[0]


# Not for the whole session: playwright keeps an event loop, beside which asyncio.run() refuses.
@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """One browser for all tests of a file."""
    api = pytest.importorskip("playwright.sync_api", reason=f"no playwright here: {INSTALL}")
    with api.sync_playwright() as playwright:
        # The sandbox does not start for root, as whom containers run; the pages are our own.
        program = find_program(playwright)
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: "Browser") -> Iterator[Callable[..., Opened]]:
    """Open a file or an address, at a width in pixels, light or dark."""
    contexts = []

    def opened(address: Path | str, *, width: int = 1200, dark: bool = False) -> Opened:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        page, complaints = context.new_page(), []
        url = address.absolute().as_uri() if isinstance(address, Path) else address
        home = "file:" if url.startswith("file:") else "/".join(url.split("/")[:3])
        page.on("console", lambda said: _note(complaints, said.type, said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: _note_address(complaints, asked.url, home))
        page.goto(url)
        return Opened(page, complaints)

    yield opened
    for context in contexts:
        context.close()


def _note(complaints: list[str], kind: str, text: str) -> None:
    if kind in ("error", "warning"):
        complaints.append(text)


def _note_address(complaints: list[str], url: str, home: str) -> None:
    if not url.startswith((home, "data:", "blob:")):
        complaints.append(f"asks for {url}")


def overflow(page: "Page") -> int:
    """By how many pixels a page is wider than its window: 0, or it scrolls sideways."""
    width: int = page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    return width
