"""Every example runs and prints what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

CASES = {
    "layer_in_your_model.py": ([], "streamed and whole differ by"),
    "train_language_model.py": (["--steps", "20"], "nats per byte"),
    "irregular_series.py": (["--steps", "5"], "in hindsight"),
    "series.py": (["--out", "{tmp}"], "series.png"),
    "train_toy_recall.py": (["--steps", "5", "--folder", "{tmp}"], "best accuracy"),
    "hybrid.py": (["--steps", "5"], "attention + kla"),
    "replace_attention.py": (["--steps", "3"], "KiB of state after 4,096 tokens"),
    "track_states.py": (["--steps", "5"], "length 256  whole sequences right"),
    "uncertainty.py": (["--steps", "10", "--plots", "{tmp}"], "epistemic"),
    "compile.py": (["--backend", "aot_eager"], "compiled and eager differ by"),
}


def run(name, *argv):
    command = [sys.executable, str(EXAMPLES / name), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_example(name, tmp_path):
    argv, promise = CASES[name]
    assert promise in run(name, *(a.format(tmp=tmp_path) for a in argv))
    if name == "uncertainty.py":
        assert sorted(p.name for p in tmp_path.iterdir()) == ["maps.png", "posterior_variance.png"]


@pytest.mark.slow
def test_scale_out(tmp_path):
    # Torch's launcher as a module: a script of its own may belong to another environment.
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    where = ["--runs", tmp_path, "--out", tmp_path, "--figure", tmp_path / "curves.png"]
    command = [sys.executable, *launch, EXAMPLES / "scale_out.py", "--steps", "3", *where]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, FSDP2" in done.stdout
    found = json.loads((tmp_path / "curves.json").read_text())
    assert max(found["apart"].values()) <= 1e-5
    assert (tmp_path / "curves.svg").exists()


def test_every_example_is_short_and_run():
    # Those of the transformers adapter have a test of their own.
    scripts = {path.name: path for path in EXAMPLES.glob("*.py") if "hf" not in path.name}
    assert set(CASES) <= set(scripts)
    for path in scripts.values():
        assert len(path.read_text().splitlines()) <= 60, path.name
