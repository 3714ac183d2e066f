import dataclasses

from kalman_attention.cli.main import main
from kalman_attention.recipes import demo


def test_the_demo_ends_in_a_page(tmp_path, capsys, monkeypatch):
    # Two updates instead of 1,500, in this process: what is shown stays the same.
    def few(scale):
        return [
            dataclasses.replace(c, run=dataclasses.replace(c.run, training=short(c.run.training)))
            for c in demo.cells(scale)
        ]

    def short(training):
        return dataclasses.replace(training, max_steps=2, eval_every=1)

    quick = dataclasses.replace(demo.EXPERIMENT, cells=few)
    monkeypatch.setattr("kalman_attention.cli.demonstration.EXPERIMENT", quick)
    assert main(["demo", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    parts = ("truth inside 95 %", "Selective copying", "A5: whole sequences", "rotating-kla")
    for part in (*parts, "mamba", "reference", "report.html"):
        assert part in printed
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") == 4  # belief, learning curves, posterior variance, lengths
