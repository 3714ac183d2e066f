"""Kill -9 at any moment, Ctrl-C and SIGTERM: training goes on as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.train import toy
from tests.train.killing import final

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX processes"),
]


def kill(*arguments):
    command = [sys.executable, "-m", "tests.train.killing", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ten_kills_at_random_moments(tmp_path):
    found = kill("random", tmp_path, time.time_ns())
    assert len(found["kills"]) == 10
    expected = final(tmp_path / "whole")
    for name in found["runs"]:
        assert final(tmp_path / name) == expected


def test_a_kill_in_every_call_that_changes_the_disk():
    # Three checkpoints: files are opened and half written, folders made, moved and removed.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # faster; order is what counts
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        assert kill("writes", folder)["kills"] > 30


def start(folder):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.train.toy", str(folder)], cwd=ROOT, env=ENVIRONMENT,
        text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        # Jobs in the background of a shell ignore SIGINT, and hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def steps(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_ctrl_c_and_sigterm_save_and_say_how_to_continue(tmp_path):
    folder = tmp_path / "run"
    # An interrupted interpreter kills itself by SIGINT, or exits with 1 if what a package runs at
    # exit makes it forget.
    cases = ((signal.SIGINT, (-2, 1), "Ctrl-C"), (signal.SIGTERM, (143,), "SIGTERM"))
    for number, codes, name in cases:
        process, before = start(folder), steps(folder)
        while steps(folder) < before + 5:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(number)
        _, shown = process.communicate(timeout=60)
        assert process.returncode in codes, shown
        assert f"{name}: saving after this step" in shown
        last = toy.records(folder)[-1]["step"]
        assert f"{name}: stopped and saved at step {last} of 80" in shown
        assert f"To continue, run\n  {sys.executable} -m tests.train.toy {folder}" in shown
        assert os.path.basename(os.readlink(folder / "last")) == f"step-{last:08d}"
    toy.run(folder, **toy.LONGER)
    toy.run(tmp_path / "whole", **toy.LONGER)
    assert final(folder) == final(tmp_path / "whole")


@pytest.fixture
def _hangups_arrive():
    """Under nohup they are ignored, and training leaves that as it is."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hangups_arrive")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("cut", [0, 2])
def test_a_signal_cuts_an_evaluation_which_is_made_up_for(tmp_path, number, cut):
    # Evaluations come at steps 3, 6 and 7, the last.
    measure, calls = toy.build()[4], iter(range(99))

    def evaluate(model):
        if next(calls) == cut:
            os.kill(os.getpid(), number)
            raise AssertionError("it was not cut at once")
        return measure(model)

    folder = tmp_path / "cut"
    options = {"save_every": None}
    with pytest.raises((SystemExit, KeyboardInterrupt)) as stopped:
        toy.run(folder, evaluate=evaluate, **options)
    code = None if number == signal.SIGINT else 128 + number
    assert getattr(stopped.value, "code", None) == code
    assert os.path.basename(os.readlink(folder / "last")) == f"step-{(3, 6, 7)[cut]:08d}"
    assert sum(record["kind"] == "eval" for record in toy.records(folder)) == cut
    _, found = toy.run(folder, **options)
    _, expected = toy.run(tmp_path / "whole", **options)
    assert final(folder) == final(tmp_path / "whole")
    assert found.best.step == expected.best.step
    assert os.readlink(folder / "best") == os.readlink(tmp_path / "whole" / "best")
