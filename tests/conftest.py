"""What tests of several parts share."""

import os

import pytest

pytest_plugins = ["tests.browser"]

# A pool of compiling processes imports torch once more in each of them, for graphs of a few lines.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


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
