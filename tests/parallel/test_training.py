"""Real processes: split sequences are exact, many train like one, killed and resumed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kalman_attention import load_model
from kalman_attention.train.checkpoint import read_checkpoint
from tests.parallel.launch import ENVIRONMENT, ROOT, command, torchrun
from tests.parallel.training import STEPS, VARIANTS, WAYS, train
from tests.train.toy import records

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_flush", "one_thread")]


def differences(folder, other, steps=STEPS):
    """Largest differences of losses and norms between two runs that logged every step."""
    a, b = records(folder), records(other)
    assert [(r["kind"], r["step"]) for r in a] == [(r["kind"], r["step"]) for r in b]
    assert sum(r["kind"] == "train" for r in a) == steps
    names = {"loss", "grad_norm", "accuracy", "largest"}
    assert all(x.keys() == y.keys() for x, y in zip(a, b, strict=True))
    return [abs(x[n] - y[n]) for x, y in zip(a, b, strict=True) for n in names & x.keys()]


def check_curves(folder, ranks):
    """Every way of training with so many ranks has the curve of one process."""
    for variant, options in VARIANTS.items():
        train(folder / f"one{variant}", **options)
        for name, (_, context) in WAYS[ranks].items():
            if context == 1 or variant != " rows":
                found = max(differences(folder / f"one{variant}", folder / f"{name}{variant}"))
                assert found <= (1e-12 if options.get("double") else 1e-5), name + variant


def check_checkpoints(folder, names):
    """Whole tensors, under the names that one process gives them."""
    one = folder / "one accumulated" / "last"
    for name in names:
        last = folder / f"{name} accumulated" / "last"
        assert read_checkpoint(last.resolve()).step == STEPS
        assert sorted(p.name for p in last.iterdir()) == sorted(p.name for p in one.iterdir())
        for file in ("model.safetensors", "optimiser.safetensors"):
            right, found = load_file(one / file), load_file(last / file)
            assert right.keys() == found.keys()
            for key, value in right.items():
                assert found[key].dtype == value.dtype
                torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11)
        assert load_model(last).head.weight.shape == (37, 16)


def check_unison(folder):
    """A signal to one rank has stopped all; a bad update of one rank is kept whole."""
    assert records(folder / "signal")[-1]["step"] == 4
    assert os.path.basename(os.readlink(folder / "signal" / "last")) == "step-00000004"
    for kind in ("ddp", "fsdp"):
        (kept,) = (folder / f"poison {kind}" / "nonfinite").iterdir()
        assert json.loads((kept / "report.json").read_text())["losses"] == ["nan"]
        batch = load_file(kept / "batches.safetensors")
        assert batch["batch.0.0"].shape == (4, 11)  # of all ranks
        weights = load_file(kept / "model.safetensors")
        first = load_file(folder / f"poison {kind}" / "last" / "model.safetensors")
        assert all(torch.equal(weights[name], first[name]) for name in first)


# Processes start slowly, so all that a number of ranks can show is shown by one start.
def test_two_ranks(tmp_path):
    assert "all ranks agree" in torchrun(2, "tests.parallel.training", "all", tmp_path)
    check_curves(tmp_path, 2)
    check_checkpoints(tmp_path, WAYS[2])
    check_unison(tmp_path)
    train(tmp_path / "constant", schedule="constant")
    train(tmp_path / "to one", schedule="constant", seed=9)
    for name in ("fsdp then ddp", "to one"):  # resumed by others
        assert max(differences(tmp_path / "constant", tmp_path / name)) <= 1e-5
    for context in (1, 2):
        # Ranks draw samples for themselves, so one process draws others; spread weights do not.
        names = (tmp_path / f"marginal {kind} {context}" for kind in ("ddp", "fsdp"))
        assert max(differences(*names, steps=4)) <= 1e-12


def test_four_ranks(tmp_path):
    train(tmp_path / "constant", schedule="constant")
    train(tmp_path / "to four", schedule="constant", max_steps=10)
    assert "all ranks agree" in torchrun(4, "tests.parallel.training", "all", tmp_path)
    check_curves(tmp_path, 4)
    check_checkpoints(tmp_path, WAYS[4])
    assert max(differences(tmp_path / "constant", tmp_path / "to four")) <= 1e-5


def wait_for(condition, process, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1][-4000:]
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def steps(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_rank_is_killed_then_all_of_them(tmp_path):
    folder = tmp_path / "killed"
    process = subprocess.Popen(
        command(2, "tests.parallel.training", "killed", folder, "fsdp", 2, restarts=1),
        cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    wait_for(lambda: all(p.exists() and p.read_text() for p in pids), process)
    first = [p.read_text() for p in pids]
    # Rank 1 kills itself in update 13; torchrun starts both again, from the checkpoint of step 12.
    wait_for(lambda: all(p.read_text() not in ("", *first) for p in pids), process)
    wait_for(lambda: max(steps(folder)) >= 15, process)
    for pid in (process.pid, *(int(p.read_text()) for p in pids)):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert max(steps(folder)) < STEPS
    torchrun(2, "tests.parallel.training", "killed", folder, "ddp", 1)  # and otherwise
    whole = tmp_path / "whole"
    train(whole, save_every=2)
    assert max(differences(whole, folder)) <= 1e-5
    assert Path(os.readlink(folder / "last")).name == f"step-{STEPS:08d}"
