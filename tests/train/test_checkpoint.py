"""Checkpoints: damaged ones are recognised, and nothing that goes wrong harms the last good one."""

import errno
import json
import os
import resource
import shutil
import signal

import pytest
import torch

from kalman_attention.train.checkpoint import (
    MANIFEST,
    CheckpointError,
    checkpoints,
    locked,
    newest_checkpoint,
    point_to,
    prune_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from kalman_attention.train.snapshot import load_weights
from tests.train.toy import build, records, run, same, weights

pytestmark = pytest.mark.usefixtures("no_flush")


def write(folder, step):
    files = {"a.bin": bytes([step]) * 1000, "b.bin": b"hello"}
    return write_checkpoint(folder, step, files, {"step": step, "nested": {"x": [0.1, None]}})


def test_round_trip(tmp_path):
    path = write(tmp_path, 3)
    found = read_checkpoint(path)
    assert found == read_checkpoint(newest_checkpoint(tmp_path).folder)
    assert (found.folder, found.step) == (path, 3)
    assert found.state == {"step": 3, "nested": {"x": [0.1, None]}}
    assert (path / "a.bin").read_bytes() == bytes([3]) * 1000


def truncate(path):
    os.truncate(path / "a.bin", 500)


def flip(path):
    data = bytearray((path / "a.bin").read_bytes())
    data[300] ^= 1
    (path / "a.bin").write_bytes(data)


def lose(path):
    (path / "b.bin").unlink()


def lose_manifest(path):
    (path / MANIFEST).unlink()


def truncate_manifest(path):
    os.truncate(path / MANIFEST, 100)


def empty_manifest(path):
    os.truncate(path / MANIFEST, 0)


def change_manifest(path):
    text = (path / MANIFEST).read_text()
    assert "0.1" in text
    (path / MANIFEST).write_text(text.replace("0.1", "0.2"))


def foreign_manifest(path):
    (path / MANIFEST).write_text(json.dumps(["something", "else"]))


def swap(path):
    shutil.copy(path.parent / "step-00000001" / "a.bin", path / "a.bin")


DAMAGE = {
    truncate: "a.bin is damaged: 500 bytes instead of 1000",
    flip: "a.bin is damaged: its contents have changed",
    swap: "a.bin is damaged: its contents have changed",
    lose: "b.bin is missing",
    lose_manifest: "it is not a checkpoint",
    truncate_manifest: "checkpoint.json is damaged",
    empty_manifest: "checkpoint.json is damaged",
    change_manifest: "checkpoint.json is damaged",
    foreign_manifest: "checkpoint.json is damaged",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_damage_is_recognised(damage, tmp_path):
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    damage(second)
    with pytest.raises(CheckpointError, match=DAMAGE[damage]):
        read_checkpoint(second)
    with pytest.warns(RuntimeWarning, match=f"{DAMAGE[damage]}.*going back to step 1"):
        assert newest_checkpoint(tmp_path) == read_checkpoint(first)
    assert (tmp_path / "damaged-step-00000002").is_dir()
    assert checkpoints(tmp_path) == [first]
    damage_only = tmp_path / "other"
    write(damage_only, 1)
    damage(write(damage_only, 2))
    shutil.rmtree(damage_only / "step-00000001")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read"):
        newest_checkpoint(damage_only)


def test_no_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path / "none") is None


def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    for step in (1, 2, 5, 9, 10, 11):
        write(tmp_path, step)
    prune_checkpoints(tmp_path, {2})
    assert [read_checkpoint(path).step for path in checkpoints(tmp_path)] == [11, 10, 2]
    assert len(list(tmp_path.iterdir())) == 3


def test_links_move(tmp_path):
    a, b = write(tmp_path / "checkpoints", 1), write(tmp_path / "checkpoints", 2)
    for target in (a, b):
        point_to(tmp_path / "last", target)
        assert (tmp_path / "last").resolve() == target.resolve()
    assert not os.path.isabs(os.readlink(tmp_path / "last"))


def test_a_folder_is_trained_in_once_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(ValueError, match="another process is training"):
        run(tmp_path)
    run(tmp_path, max_steps=3)


@pytest.mark.parametrize("failing", ["write", "rename", "mkdir"])
def test_a_full_disk_leaves_the_last_checkpoint(failing, tmp_path, monkeypatch):
    model, _ = run(tmp_path / "whole")
    _, _, loss, _, _ = build()
    calls = iter(range(100))

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(model, batch, generator):
        if next(calls) == 4:
            monkeypatch.setattr(os, failing, full)
        return loss(model, batch, generator)

    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        run(tmp_path / "full", loss=fill)
    assert "step-00000004, is intact" in str(caught.value)
    monkeypatch.undo()
    assert not list((tmp_path / "full" / "checkpoints").glob(".part*"))
    other, _ = run(tmp_path / "full")
    assert same(weights(model), weights(other))
    assert records(tmp_path / "full") == records(tmp_path / "whole")


def test_a_limit_on_file_sizes(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    write(tmp_path, 1)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))
        with pytest.raises(CheckpointError, match=r"File too large.*step-00000001, is intact"):
            write(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert newest_checkpoint(tmp_path).step == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["model.safetensors", "optimiser.safetensors"])
def test_a_run_goes_back_behind_a_truncated_checkpoint(name, tmp_path):
    model, _ = run(tmp_path / "whole")
    run(tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "checkpoints" / "step-00000007" / name, 999)
    expected = f"{name} is damaged: 999 bytes instead of .* going back to step 6"
    with pytest.warns(RuntimeWarning, match=expected):
        other, result = run(tmp_path / "cut")
    assert result.step == 7
    assert same(weights(model), weights(other))
    assert records(tmp_path / "cut") == records(tmp_path / "whole")


def test_weights_of_damaged_and_other_checkpoints(tmp_path):
    model, _ = run(tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="weights of another model"):
        load_weights(torch.nn.Linear(2, 2), tmp_path / "last")
    os.truncate(tmp_path / "last" / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load_weights(model, tmp_path / "last")


def test_a_lock_touches_no_file_of_another(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(precious)
    with pytest.raises(OSError, match="lock"), locked(tmp_path / "run"):
        pass
    assert precious.read_text() == "kept"


def test_nothing_is_pickled(tmp_path):
    run(tmp_path, max_steps=2)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {
        ".lock", "checkpoint.json", "config.json", "metrics.jsonl", "model.safetensors",
        "optimiser.safetensors",
    }  # fmt: skip
