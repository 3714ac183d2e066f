"""Whatever ends a command, its processes end with it, and what was finished is kept."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.data.small import text
from tests.processes import kla, start_kla

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc"),
]

PATIENCE = 120.0
"""Seconds to wait for what takes a moment on a quiet machine."""

MAD = (
    "reproduce", "mad", "--scale", "smoke", "--jobs", "2", "--out", "out",
    "--only", "recall", "--only", "memorization", "--only", "compression",
)  # fmt: skip
CELLS = 20
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -9}


def members(session: int) -> dict[int, str]:
    """Processes of a session that have not ended, with their commands."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, _, own = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it has ended
            if int(own) == session and state != "Z":
                found[int(folder.name)] = command
    return found


def wait_until(condition, seconds=PATIENCE, process=None):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)
    return found


def default_signals():
    # Jobs in the background of a shell ignore SIGINT, and hand that on.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(*args, cwd, **options):
    return start_kla(*args, cwd=cwd, preexec_fn=default_signals, **options)


def assert_gone(process, number, seconds=PATIENCE):
    """The command has the code of the signal, and nobody holds its output open or lives on."""
    said, _ = process.communicate(timeout=seconds)  # end of file: nobody has the pipe any more
    assert process.returncode == CODES[number], said
    assert "Traceback" not in said
    wait_until(lambda: not members(process.pid), 5.0)
    return said


def results(folder):
    cells = sorted((folder / "out" / "mad-smoke" / "cells").glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in cells}


# A terminal and most schedulers tell the whole group of processes, kill tells one.
STOPS = (
    (os.killpg, signal.SIGINT),
    (os.kill, signal.SIGTERM),
    (os.killpg, signal.SIGHUP),
    (os.kill, signal.SIGKILL),
)


def test_workers_end_with_the_command_and_cells_are_kept(tmp_path):
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    for folder in (stopped, whole):
        folder.mkdir()
    kept = {}
    for send, number in STOPS:
        process = start(*MAD, cwd=stopped)
        wait_until(lambda: len(results(stopped)) > len(kept), process=process)  # noqa: B023
        # The command, two workers, Python's resource tracker.
        assert len(members(process.pid)) == 4, members(process.pid)
        send(process.pid, number)
        said = assert_gone(process, number)
        before, kept = kept, results(stopped)
        assert all(kept[name] == before[name] for name in before)  # dates included
        if number != signal.SIGKILL:
            left = CELLS - len(before)
            new = len(kept) - len(before)
            assert f"stopped: {new} of {left} cells are finished and kept" in said
    assert len(kept) < CELLS
    for folder in (stopped, whole):
        done = kla(*MAD, cwd=folder)
        assert done.returncode == 0, done.stderr
    found, expected = results(stopped), results(whole)
    assert len(expected) == CELLS
    assert {name: cell["metrics"] for name, cell in found.items()} == {
        name: cell["metrics"] for name, cell in expected.items()
    }


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A text of a few seconds of work."""
    path = tmp_path_factory.mktemp("book") / "book.jsonl"
    lines = [json.dumps({"text": text(i, 1000)}) for i in range(64)]
    path.write_text("\n".join(lines * 12))
    return path


def test_tokenising_ends_with_the_command(tmp_path, book):
    pytest.importorskip("tokenizers")
    build = ("data", str(book), "--vocab-size", "300", "--shard-tokens", "50_000", "--workers", "2")
    for send, number in ((os.killpg, signal.SIGTERM), (os.kill, signal.SIGKILL)):
        process = start(*build, "--out", number.name, cwd=tmp_path)
        first = tmp_path / number.name / "train_00000.json"
        wait_until(first.exists, process=process)
        assert len(members(process.pid)) == 4, members(process.pid)
        send(process.pid, number)
        assert_gone(process, number)
        assert not (tmp_path / number.name / "index.json").exists()
    done = kla(*build, "--out", "SIGKILL", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert kla("data", "check", "SIGKILL", cwd=tmp_path).returncode == 0


def test_measuring_memory_ends_with_the_command(tmp_path):
    program = (
        "import os, signal, torch\n"
        "from kalman_attention.benchmarks import measure\n"
        "if __name__ == '__main__':\n"
        "    shape = measure.Shape(64, 65536, 64, 16)\n"
        "    measure.peak_memory(shape, 'reference', backward=False)\n"
    )
    (tmp_path / "measuring.py").write_text(program)
    process = subprocess.Popen(
        [sys.executable, "measuring.py"], cwd=tmp_path, start_new_session=True
    )
    wait_until(lambda: len(members(process.pid)) == 3, process=process)
    process.kill()
    process.wait()
    wait_until(lambda: not members(process.pid), 30.0)  # it may be importing torch


SMALL = (
    "--tokens", "2M", "--batch-tokens", "256", "--seq-len", "64", "--micro-batch", "4",
    "--eval-tokens", "1024", "--eval-every", "7", "--warmup-steps", "2", "--save-seconds", "1000",
    "--log-every", "1",
)  # fmt: skip


def last_step(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def on_terminal(*args, cwd):
    """Start ``kla`` on a terminal of its own; returns the process and the terminal's other end."""
    ours, theirs = pty.openpty()

    def take_terminal():
        default_signals()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process = start_kla(
        *args, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal
    )
    os.close(theirs)
    return process, ours


def test_pretraining_saves_when_it_is_told_to_stop(tmp_path, book):
    pytest.importorskip("tokenizers")
    data = ("data", str(book), "--vocab-size", "300", "--out", "data", "--workers", "1")
    assert kla(*data, cwd=tmp_path).returncode == 0
    run, train = tmp_path / "run", ("pretrain", "nano", "--shards", "data", "--out", "run", *SMALL)
    process, terminal = on_terminal(*train, cwd=tmp_path)
    wait_until(lambda: os.read(terminal, 1000) and last_step(run) >= 10, process=process)
    os.close(terminal)  # the window is closed: SIGHUP, and nothing can be printed any more
    process.wait(PATIENCE)
    assert process.returncode == CODES[signal.SIGHUP]
    step = last_step(run)
    assert os.readlink(run / "last") == f"checkpoints/step-{step:08d}"
    process = start(*train, cwd=tmp_path)
    wait_until(lambda: last_step(run) > step + 10, process=process)
    process.terminate()
    said = assert_gone(process, signal.SIGTERM)
    assert f"resuming run at step {step} of" in said
    step = last_step(run)
    assert f"SIGTERM: stopped and saved at step {step} of" in said
    assert "To continue, run\n  kla pretrain nano --shards data --out run" in said
    assert os.readlink(run / "last") == f"checkpoints/step-{step:08d}"
    # Before there is anything to save it ends as well.
    process = start(*train, cwd=tmp_path)
    wait_until(lambda: "plan" in process.stdout.readline(), process=process)
    process.send_signal(signal.SIGTERM)
    assert_gone(process, signal.SIGTERM)


def test_nohup_keeps_a_command_running(tmp_path):
    process = start_kla(*MAD, cwd=tmp_path, preexec_fn=lambda: signal.signal(1, signal.SIG_IGN))
    wait_until(lambda: results(tmp_path), process=process)
    os.killpg(process.pid, signal.SIGHUP)
    count = len(results(tmp_path))
    wait_until(lambda: len(results(tmp_path)) > count + 2, process=process)
    process.terminate()
    assert_gone(process, signal.SIGTERM)
