"""Train in child processes and kill them: ``python -m tests.train.killing random|writes FOLDER``.

A process of its own, so that every child starts from the loaded libraries and from one thread.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from kalman_attention.train.config import TrainConfig
from kalman_attention.train.data import TensorBatches
from kalman_attention.train.loop import fit
from tests.train import toy

CHANGES = ("mkdir", "open", "rename", "replace", "rmdir", "symlink", "truncate", "unlink", "write")


def child(work, *arguments, **options):
    """Start a process that does some work and ends."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work(*arguments, **options)
            code = 0
        finally:
            os._exit(code)
    return pid


def wait(pid):
    """Exit code of a child; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at_random(folder, kills, seed):
    """Kill runs at random moments until there were enough; finish them; report what was hit."""
    options = {"max_steps": 30, "eval_every": 5, "save_every": 2}
    start = time.perf_counter()
    assert wait(child(toy.run, folder / "whole", **options)) == 0
    whole = time.perf_counter() - start
    choose = random.Random(seed)
    hits, runs, names = [], 0, []
    while len(hits) < kills:
        names.append(folder / f"killed-{runs}")
        runs += 1
        code = -signal.SIGKILL
        while code == -signal.SIGKILL and len(hits) < kills:
            pid = child(toy.run, names[-1], **options)
            time.sleep(choose.uniform(0.0, whole / 5))
            os.kill(pid, signal.SIGKILL)
            code = wait(pid)
            if code == -signal.SIGKILL:
                hits.append(sorted(p.name for p in (names[-1] / "checkpoints").glob("*")))
        if code == -signal.SIGKILL:
            assert wait(child(toy.run, names[-1], **options)) == 0
    print(json.dumps({"kills": hits, "runs": [name.name for name in names]}))


def line(folder):
    """Fit a line in two updates: a run that does little but save."""

    def loss(model, batch, generator):
        return (model(batch[0]) - torch.rand(4, 1, generator=generator)).square().mean()

    def evaluate(model):
        return {"weight": float(model.weight)}

    torch.manual_seed(0)
    batches = TensorBatches([torch.linspace(0.0, 1.0, 8).view(8, 1)], batch_size=4)
    config = TrainConfig(max_steps=2, save_every=1, eval_every=1, log_every=1, monitor="weight")
    model = torch.nn.Linear(1, 1)
    fit(model, batches, loss, config, folder=folder, evaluate=evaluate, progress=False)


def kill_in_call(number):
    """Kill this process in its n-th call that changes the disk; a write is left half done."""
    calls = iter(range(10**6))

    def wrap(name, function):
        def wrapped(*arguments, **options):
            reads = name == "open" and not arguments[1] & os.O_CREAT
            if not reads and next(calls) == number:
                if name == "write":
                    handle, data = arguments
                    function(handle, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapped

    for name in CHANGES:
        setattr(os, name, wrap(name, getattr(os, name)))


def kill_in_every_call(folder):
    """Kill a run in its first, second, ... call that changes the disk, and finish it each time."""
    os.fsync = lambda handle: None  # no power fails here, and a kill does not lose what is written

    def cut(number, where):
        kill_in_call(number)
        line(where)

    assert wait(child(line, folder / "whole")) == 0
    expected = final(folder / "whole")
    number = 0
    where = folder / "cut"
    while wait(child(cut, number, where)) == -signal.SIGKILL:
        assert wait(child(line, where)) == 0, number
        assert final(where) == expected, number
        shutil.rmtree(where)
        number += 1
    print(json.dumps({"kills": number}))


def final(folder):
    """Bytes of the last weights and moments, and the metrics."""
    last = folder / "last"
    assert not list((folder / "checkpoints").glob(".*"))
    files = [(last / name).read_bytes() for name in ("model.safetensors", "optimiser.safetensors")]
    return files, toy.records(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # loads a lot; once, and not in every child
    if sys.argv[1] == "random":
        kill_at_random(Path(sys.argv[2]), kills=10, seed=int(sys.argv[3]))
    else:
        kill_in_every_call(Path(sys.argv[2]))
