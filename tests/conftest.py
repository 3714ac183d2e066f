"""What tests of several parts share."""

import os

import pytest
import torch
from hypothesis import register_random

pytest_plugins = ["tests.browser"]

# A pool of compiling processes imports torch once more in each of them, for graphs of a few lines.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


class _TorchRandom:
    """torch's generator as hypothesis expects it, so that an example fails again when repeated."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


_torch_random = _TorchRandom()  # hypothesis keeps no reference of its own
register_random(_torch_random)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Start every test from the same state, whichever tests its process ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _own_compiled_graphs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what torch compiles in a folder of this process.

    By default there is one folder per user: processes that test side by side write to it at the
    same time, and it remembers graphs that were traced with other versions of our ops.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture
def no_flush(monkeypatch):
    """Do not wait for the disk where no power fails; the order of writes stays as it is."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
