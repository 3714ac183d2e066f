import dataclasses
import sys

import pytest

from kalman_attention.cli.main import main
from kalman_attention.recipes import demo


@pytest.fixture
def quick(monkeypatch):
    # Two updates instead of 1,500, in this process: what is shown stays the same.
    def few(scale):
        return [
            dataclasses.replace(c, run=dataclasses.replace(c.run, training=short(c.run.training)))
            for c in demo.cells(scale)
        ]

    def short(training):
        return dataclasses.replace(training, max_steps=2, eval_every=1)

    short_one = dataclasses.replace(demo.EXPERIMENT, cells=few)
    monkeypatch.setattr("kalman_attention.cli.demonstration.EXPERIMENT", short_one)


def test_the_demo_ends_in_a_page(tmp_path, capsys, quick):
    assert main(["demo", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    parts = ("truth inside 95 %", "Selective copying", "A5: sequences entirely", "rotating-kla")
    for part in (*parts, "mamba", "reference", "report.html"):
        assert part in printed
    page = (tmp_path / "report.html").read_text()
    assert page.count('<figure class="chart">') == 4  # belief, curves, variance, lengths
    assert 'class="band"' in page


def test_without_a_template_engine_the_demo_still_shows_everything_else(
    tmp_path, capsys, quick, monkeypatch
):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["demo", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Engines" in printed
    assert "no page: it needs jinja2 (pip install 'kalman_attention[report]')" in printed
    assert not (tmp_path / "report.html").exists()
