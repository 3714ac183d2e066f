"""Start real processes: ``torchrun`` on this machine, with the gloo backend."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command(ranks, module, *arguments, restarts=0):
    """How to start ``ranks`` processes of a module."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return [*launcher, *options, "-m", module, *map(str, arguments)]


def torchrun(ranks, module, *arguments, restarts=0):
    """Run to the end, which must be a good one; returns what was printed."""
    done = subprocess.run(
        command(ranks, module, *arguments, restarts=restarts),
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout + done.stderr
