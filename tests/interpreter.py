"""What makes tests in Triton's interpreter bearable: it takes tens of milliseconds per token."""

import importlib.util
import os
from typing import Any

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


CHUNK, WINDOW = 8, 4
"""Sizes that bring up every border within 40 tokens."""


def shrink(monkeypatch: pytest.MonkeyPatch, *, fill: int, lanes: int) -> None:
    """Cut a call of 40 tokens as a call of 320 would be: short chunks, few channels per tile.

    Args:
        monkeypatch: of the test.
        fill: 1 for the lane-serial schedule, 512 for the time-split one.
        lanes: lanes of a program, in both passes.
    """
    from kalman_attention.ops import contract
    from kalman_attention.ops.triton import bwd, fwd, schedule
    from kalman_attention.tools import roofline

    for module in (contract, schedule, roofline, fwd, bwd):
        monkeypatch.setattr(module, "CHUNK", CHUNK)
    monkeypatch.setattr(bwd, "WINDOW", WINDOW)
    monkeypatch.setattr(fwd, "FORWARD_LANES", lanes)
    monkeypatch.setattr(bwd, "BACKWARD_LANES", lanes)
    monkeypatch.setattr(schedule, "FILL", fill)


def patch_once_per_launch() -> None:
    """Make the interpreter about four times faster.

    It patches the language anew at every call of a function inside a kernel; once per launch and
    module is enough. Does nothing when Triton is not there or not interpreting.
    """
    if not INTERPRETING or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_lang(function: Any) -> Any:
        home = id(function.__globals__)
        if home not in patched:
            patched.add(home)
            return patch(function)
        return None

    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, start
