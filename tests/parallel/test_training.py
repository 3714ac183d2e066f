"""Many processes train like one: the same curve, the same checkpoints, killed and resumed."""

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

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_flush")]


def differences(folder, other, steps=STEPS):
    """Largest differences of losses and norms between two runs that logged every step."""
    a, b = records(folder), records(other)
    assert [(r["kind"], r["step"]) for r in a] == [(r["kind"], r["step"]) for r in b]
    assert sum(r["kind"] == "train" for r in a) == steps
    names = {"loss", "grad_norm", "accuracy", "largest"}
    assert all(x.keys() == y.keys() for x, y in zip(a, b, strict=True))
    return [abs(x[n] - y[n]) for x, y in zip(a, b, strict=True) for n in names & x.keys()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One process, then two, then four, each in every way."""
    folder = tmp_path_factory.mktemp("runs")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for variant, options in VARIANTS.items():
        train(folder / f"one{variant}", **options)
    train(folder / "one constant", schedule="constant")
    for ranks in WAYS:
        torchrun(ranks, "tests.parallel.training", "curves", folder)
    train(folder / "to one", schedule="constant", seed=9)
    torch.set_num_threads(threads)
    return folder


CASES = [
    (name, variant)
    for ways in WAYS.values()
    for name, (_, context) in ways.items()
    for variant in VARIANTS
    if context == 1 or variant != " rows"
]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_the_curve_is_that_of_one_process(runs, name, variant):
    found = max(differences(runs / f"one{variant}", runs / f"{name}{variant}"))
    assert found <= (1e-12 if VARIANTS[variant].get("double") else 1e-5)


@pytest.mark.parametrize("name", ["fsdp then ddp", "to one", "to four"])
def test_a_run_goes_on_with_other_ranks(runs, name):
    assert max(differences(runs / "one constant", runs / name)) <= 1e-5


@pytest.mark.parametrize("context", [1, 2])
def test_posterior_samples_are_those_of_the_rank(runs, context):
    # Ranks draw for themselves, so one process draws others; spread weights change nothing.
    names = (runs / f"marginal {kind} {context}" for kind in ("ddp", "fsdp"))
    assert max(differences(*names, steps=4)) <= 1e-12


def test_checkpoints_are_those_of_one_process(runs):
    one = runs / "one accumulated" / "last"
    for name in ("ddp accumulated", "fsdp accumulated", "fsdp, data 2 x context 2 accumulated"):
        last = runs / name / "last"
        assert read_checkpoint(last.resolve()).step == STEPS
        assert sorted(p.name for p in last.iterdir()) == sorted(p.name for p in one.iterdir())
        for file in ("model.safetensors", "optimiser.safetensors"):
            right, found = load_file(one / file), load_file(last / file)
            assert right.keys() == found.keys()
            for key, value in right.items():
                assert found[key].dtype == value.dtype
                torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11)
        assert load_model(last).head.weight.shape == (37, 16)


def test_a_signal_to_one_rank_stops_all(runs):
    assert records(runs / "signal")[-1]["step"] == 4
    assert os.path.basename(os.readlink(runs / "signal" / "last")) == "step-00000004"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_bad_update_of_one_rank_is_kept_whole(runs, kind):
    (kept,) = (runs / f"poison {kind}" / "nonfinite").iterdir()
    assert json.loads((kept / "report.json").read_text())["losses"] == ["nan"]
    batch = load_file(kept / "batches.safetensors")
    assert batch["batch.0.0"].shape == (4, 11)  # of all ranks
    weights = load_file(kept / "model.safetensors")
    first = load_file(runs / f"poison {kind}" / "last" / "model.safetensors")
    assert all(torch.equal(weights[name], first[name]) for name in first)


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
