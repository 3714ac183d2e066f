"""The command in a process of its own, as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

KLA = (sys.executable, "-m", "kalman_attention")
"""``kla``, from the environment that runs the tests."""


def kla(
    *args: str, cwd: Path, timeout: float = 300.0, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``kla`` to its end; standard input is empty, both outputs are kept.

    Args:
        args: what stands behind ``kla``.
        cwd: where it runs; default folders such as runs/ are made there.
        timeout: seconds after which the test fails.
        env: variables that differ from those of the tests.
        options: for ``subprocess.run``.
    """
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True} | options
    return subprocess.run(
        [*KLA, *args],
        cwd=cwd,
        env=os.environ | (env or {}),
        timeout=timeout,
        check=False,
        **options,
    )


def start_kla(*args: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """Start ``kla`` in a session of its own and return at once."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
    return subprocess.Popen([*KLA, *args], cwd=cwd, start_new_session=True, **options)


def assert_refused(
    done: subprocess.CompletedProcess[str], *words: str, code: tuple[int, ...] = (1, 2)
) -> None:
    """The command ended with a message that holds ``words``, and with no traceback."""
    assert done.returncode in code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    missing = [word for word in words if word not in done.stderr]
    assert not missing, (missing, done.stderr)
