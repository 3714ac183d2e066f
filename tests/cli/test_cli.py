"""The command line: what a user types, what comes back."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kalman_attention._tables import render
from kalman_attention.benchmarks import measure
from kalman_attention.cli.main import main
from kalman_attention.ops.engines import ENGINES
from kalman_attention.tools import engines
from kalman_attention.tools.selfcheck import Case


def test_check_lists_every_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ENGINES)
    assert "auto on cpu means: " in said


def test_check_run_passes_and_fails_as_it_should(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "CASES", {"plain": Case(B=1, T=9, N=2, D=3)})
    assert main(["check", "--run"]) == 0
    assert "MISSES" not in capsys.readouterr().out
    engine = ENGINES["associative"].load()
    honest = engine.forward

    def wrong(*args: object, **options: object) -> object:
        result = honest(*args, **options)
        return result._replace(y=result.y * (1 + 1e-3))

    monkeypatch.setattr(engine, "forward", wrong)
    assert main(["check", "--run", "--engine", "associative"]) == 1
    assert "MISSES: y" in capsys.readouterr().out


def test_the_filter_of_the_demo_is_calibrated_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    from kalman_attention.cli.demonstration import show_belief

    show_belief(tmp_path)
    said = capsys.readouterr().out
    coverage = [float(x) for x in re.findall(r"(\d+\.\d) %$", said, re.MULTILINE)]
    assert len(coverage) == 2
    assert all(93.0 < x < 97.0 for x in coverage)
    assert (tmp_path / "belief.png").stat().st_size > 10_000


def test_bench_scan_sweeps_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    lengths = ["--lengths", "16", "32", "--channels", "8", "--slots", "2"]
    chosen = ["--engines", "reference", "associative", "--only", "sweep"]
    assert main(["bench", "scan", *lengths, *chosen, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "scan.json").read_text())
    assert results["about"]["torch"] == torch.__version__
    for found in results["sweep"]["passes"].values():
        assert set(found) == {"reference", "associative"}
        assert set(found["reference"]["seconds"]) == {"16", "32"}
    assert "T=32" in capsys.readouterr().out
    assert (tmp_path / "scaling_forward_backward.svg").exists()


def test_an_engine_that_needs_too_much_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from kalman_attention.benchmarks import scan as bench_scan

    monkeypatch.setattr(bench_scan, "available_memory", lambda _device: 1000)
    assert "out of memory" in str(bench_scan._hopeless(100, {}, 50.0, 20.0))
    assert "over 20 s" in str(bench_scan._hopeless(100, {50: 11.0}, 1.0, 20.0))
    assert bench_scan._hopeless(100, {50: 1.0}, 1.0, 20.0) is None


def test_peak_memory_sees_an_expanded_state() -> None:
    shape = measure.Shape(B=1, T=256, D=64, N=16)
    expanded = 8 * shape.T * shape.D * shape.N
    found = measure.peak_memory(shape, "mobius", backward=False)
    assert found is not None
    assert found > 3 * expanded


def test_fastest_takes_the_least_and_warms_up() -> None:
    calls: list[str] = []
    times = measure.fastest({"a": lambda: calls.append("a")}, seconds=0.0, most=5)
    assert len(calls) == 3
    assert 0.0 < times["a"] < 1.0


def test_table_aligns_numbers_to_the_right() -> None:
    assert render(["name", "x"], [["a", "1.0"], ["bb", "10.0"]]).splitlines() == [
        "name     x",
        "----  ----",
        "a      1.0",
        "bb    10.0",
    ]


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "kalman_attention", "sizes", "--paper", "mad"]
    read, write = os.pipe()
    os.close(read)  # as head does after its lines
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
