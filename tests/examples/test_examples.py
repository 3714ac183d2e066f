"""Every example runs and prints what it promises."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

CASES = {
    "layer_in_your_model.py": ([], "streamed and whole differ by"),
    "train_language_model.py": (["--steps", "20"], "nats per byte"),
    "train_toy_recall.py": (["--steps", "5", "--folder", "{tmp}"], "best accuracy"),
    "hybrid.py": (["--steps", "5"], "attention + kla"),
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


def test_every_example_is_short_and_run():
    # Those of the transformers adapter have a test of their own.
    scripts = {path.name: path for path in EXAMPLES.glob("*.py") if "hf" not in path.name}
    assert set(CASES) <= set(scripts)
    for path in scripts.values():
        assert len(path.read_text().splitlines()) <= 60, path.name
