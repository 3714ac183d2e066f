"""The examples of the adapter run and print what they promise."""

import pytest

from tests.examples.test_examples import EXAMPLES, run

CASES = {
    "hf_auto_classes.py": (["--folder", "{tmp}"], "equals the single prompt: True"),
    "hf_trainer.py": (["--steps", "20"], "nats per byte"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_example(name, tmp_path):
    argv, promise = CASES[name]
    printed = run(name, *(a.format(tmp=tmp_path) for a in argv))
    assert promise in printed
    if name == "hf_trainer.py":
        words = printed.rpartition("loss fell from ")[2].split()
        assert float(words[2]) < 0.8 * float(words[0])


def test_every_example_is_short_and_run():
    scripts = {path.name: path for path in EXAMPLES.glob("hf*.py")}
    assert set(scripts) == set(CASES)
    assert all(len(path.read_text().splitlines()) <= 60 for path in scripts.values())
