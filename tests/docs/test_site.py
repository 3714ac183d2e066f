"""The site builds without a warning, holds every page, and fetches nothing from a network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import PAGES, ROOT

pytest.importorskip("latex2mathml")
pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings_handlers.python")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = [p.relative_to(ROOT / "docs") for p in PAGES if p.is_relative_to(ROOT / "docs")]
    assert len(pages) > 30
    missing = [page for page in pages if not (site / page.with_suffix(".html")).exists()]
    assert not missing
    assert (site / "changelog.html").exists()


def test_sources_and_figures_that_pages_name_are_on_the_site(site: Path) -> None:
    assert (site / "source/examples/hybrid.py.html").exists()
    benchmarks = (site / "benchmarks.html").read_text()
    (figure,) = re.findall(r'src="([^"]*scaling_forward\.png)"', benchmarks)
    assert (site / figure).exists()


def test_the_reference_has_the_docstrings(site: Path) -> None:
    page = (site / "api/ops.html").read_text()
    assert 'id="kalman_attention.kla_scan"' in page
    assert "filter a sequence of tokens" in page


def test_formulas_and_sessions_are_drawn(site: Path) -> None:
    pages = [page.read_text() for page in (site / "api").glob("*.html")]
    assert any("<mfrac>" in page for page in pages)
    for page in pages:
        assert ".. math::" not in page
        assert ":math:" not in page
        assert "<blockquote>" not in page  # what Markdown makes of >>>


def test_nothing_comes_from_a_network(site: Path) -> None:
    fetched = r'<(?:script|img|iframe|source)[^>]*src="(?:https?:)?//|<link[^>]*href="https?://'
    for page in site.rglob("*.html"):
        assert not re.search(fetched, page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", style.read_text()), style
