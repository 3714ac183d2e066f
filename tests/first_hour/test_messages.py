"""Mistakes are answered in words: what is wrong, what there is, what was probably meant."""

import os
import sys

import pytest

pytest.importorskip("tokenizers")

import torch

from kalman_attention.cli.main import main
from kalman_attention.cli.paths import in_words, writable_file, writable_folder
from kalman_attention.recipes import mad
from kalman_attention.recipes.cell import Results
from tests.evaluation.checkpoints import checkpoint
from tests.processes import assert_refused, kla

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def refused(capsys, *given):
    """What a command line is told that is refused, in this process."""
    try:
        code = main(given)
    except SystemExit as stopped:
        code = stopped.code
    assert code in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("pretrian nano", "did you mean 'pretrain'?"),
        ("pretrain kla-nanno", "did you mean 'kla-nano'?"),
        ("pretrain KLA-Nano", "did you mean 'kla-nano'?"),
        ("sizes gpt-45", "did you mean 'gpt-45m'?"),
        ("sizes --paper mead", "did you mean 'mad'?"),
        ("reproduce madd", "did you mean 'mad'?"),
        ("reproduce mad --scale smoek", "did you mean 'smoke'?"),
        ("reproduce mad --job 2", "did you mean --jobs?"),
        ("task show recal", "did you mean 'recall'?"),
        ("task lst", "did you mean 'list'?"),
        ("bench scna", "did you mean 'scan'?"),
        ("bench mixers --mixers mambo", "did you mean 'mamba'?"),
        ("bench scan --engines asociative", "did you mean 'associative'?"),
        ("check --run --engine cuad", "did you mean 'cuda'?"),
        ("generate x --max-tokens 3", "did you mean --max-new-tokens?"),
        ("generate x --uncertainty entrpy", "did you mean 'entropy'?"),
        ("pretrain nano --lost mean", "did you mean --loss?"),
    ],
)
def test_a_misspelt_name(line, meant, capsys):
    assert meant in refused(capsys, *line.split())


@no_gpu
@pytest.mark.parametrize("verb", ["pretrain nano", "eval x", "generate x", "bench scan"])
@pytest.mark.parametrize("device", ["cuda", "cuda:7", "tpu"])
def test_a_device_that_is_not_there(verb, device, capsys):
    told = refused(capsys, *verb.split(), "--device", device)
    assert f"unknown device '{device}'" in told
    assert "Known: cpu." in told


def test_missing_shards_are_not_to_be_made_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = refused(capsys, "pretrain", "nano")
    assert "there is no folder runs/data. `kla data` creates one" in told
    assert "again" not in told


def test_a_library_that_is_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [m for m in sys.modules if m.startswith(("kalman_attention.plots", "matplotlib."))]:
        monkeypatch.delitem(sys.modules, name)
    told = refused(capsys, "compare", "x")
    assert "this needs matplotlib, which is not installed" in told
    assert "pip install 'kalman_attention[plot]'" in told


def test_a_page_needs_a_template_engine(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    results, cell = Results(tmp_path, "smoke"), mad.cells("smoke")[0]
    metrics = {"accuracy": 0.5, "token_accuracy": 0.5}
    results.save(cell, {"metrics": metrics, "curve": [{"step": 1, "accuracy": 0.5}]})
    told = refused(capsys, "report", str(tmp_path))
    assert "this needs jinja2, which is not installed" in told
    assert "pip install 'kalman_attention[report]'" in told


@pytest.mark.parametrize(
    "line",
    [
        "demo --out a.txt", "data --out a.txt", "pretrain nano --out a.txt/run",
        "reproduce mad --out a.txt", "eval m --out .", "eval m --out a.txt/b.json",
        "report . --out folder", "compare x --out a.txt", "bench decode --out a.txt",
        "check --compile --out folder", "bench scan --out /proc/x/y",
    ],
)  # fmt: skip
def test_a_bad_place_is_found_before_the_work(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    told = refused(capsys, *line.split())
    assert "is a file" in told or "is a folder" in told or "nothing can be written" in told
    assert "Errno" not in told
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "folder"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_places_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    for check in (writable_folder, writable_file):
        with pytest.raises(ValueError, match="nothing can be written"):
            check(tmp_path / "new" / "x")


def test_errors_of_the_system_in_words(tmp_path):
    told = []
    for name in ("nowhere", ""):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            (tmp_path / name).read_text()
        told.append(in_words(caught.value))
    assert told == [
        f"{tmp_path / 'nowhere'} does not exist.",
        f"{tmp_path} is a folder, where a file is needed.",
    ]
    assert in_words(OSError("cannot write")) == "cannot write"


def test_memory_that_is_not_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told = refused(capsys, "bench", "layer", "--width", "4Mi", "--lengths", "1")  # 128 TiB
    assert "not enough memory" in told


def test_as_a_user_meets_it(tmp_path):
    checkpoint(tmp_path / "m")
    assert_refused(
        kla("eval", "m", "--text", "no.txt", cwd=tmp_path), "error: no.txt does not exist"
    )
    if not torch.cuda.is_available():
        done = kla("generate", "m", "the", "--device", "cuda", cwd=tmp_path)
        assert_refused(done, "unknown device 'cuda'", "Known: cpu.")
    lost = kla("check", cwd=tmp_path, env={"KLA_CPU_LIBRARY": str(tmp_path / "no.so")})
    assert lost.returncode == 0
    assert "C++17 compiler" in lost.stdout
    assert "pip install --force-reinstall --no-deps ." in lost.stdout
    assert "kla check" not in lost.stdout + lost.stderr
