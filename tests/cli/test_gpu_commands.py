"""Commands about GPUs, on a machine that may have none."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kalman_attention.cli.main import main
from kalman_attention.tools import engines
from kalman_attention.tools.resources import KernelResources

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_engine(engine: str, architectures: Sequence[str]) -> list[KernelResources] | str:
        if engine == "cuda":
            return "nvcc is not on the path"
        return [KernelResources("walk", "float32", arch, 90, 8, 0) for arch in architectures]

    monkeypatch.setattr(engines, "compile_engine", compile_engine)


@pytest.mark.usefixtures("compiler")
def test_check_compile_lists_resources_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "resources.md"
    assert main(["check", "--compile", "sm_80", "sm_90", "--out", str(path)]) == 0
    said = capsys.readouterr().out
    assert "cuda: not compiled: nvcc is not on the path" in said
    assert "1 variants compiled, 1 of them spill registers" in said
    assert (
        "| triton | walk | float32 | sm_80 / sm_90 | 90 / 90 | 8 / 8 | 0 / 0 |" in path.read_text()
    )


def test_check_compile_without_any_compiler_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "compile_engine", lambda _engine, _architectures: "missing")
    assert main(["check", "--compile"]) == 1


def test_an_engine_that_does_not_exist_is_not_compiled() -> None:
    assert engines.compile_engine("abacus", ["sm_80"]) == "this version has no such engine"


@no_gpu
def test_a_gpu_report_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--out", str(tmp_path)]) == 1
    assert "no GPU here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["bench", "scan", "--device", "cuda"]) == 1
    assert "unknown device 'cuda'" in capsys.readouterr().err


@no_gpu
@pytest.mark.usefixtures("compiler")
def test_a_dry_run_reports_what_needs_no_gpu(tmp_path: Path) -> None:
    assert main(["bench", "gpu", "--dry-run", "--out", str(tmp_path)]) == 0
    report = (tmp_path / "report.md").read_text()
    assert "Nothing below ran on hardware" in report
    assert "lane-serial" in report
    assert "| cuda | not compiled: nvcc is not on the path |" in report
    assert json.loads((tmp_path / "report.json").read_text())["about"]["gpu"] is None


def test_roofline_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "roofline"]) == 0
    said = capsys.readouterr().out
    assert "H100" in said
    assert "nothing measured" in said
    assert main(["bench", "roofline", "--markdown"]) == 0
    assert "| --- |" in capsys.readouterr().out
