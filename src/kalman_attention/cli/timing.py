"""Timing for the bench verbs: interleaved, so that all sides see the same machine."""

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import kalman_attention
from kalman_attention.ops.engines import resolve


def interleaved(
    work: Mapping[str, Callable[[], object]], *, repeats: int, seconds: float
) -> dict[str, list[float]]:
    """Seconds of every repetition of every piece of work, taken in turns.

    Args:
        work: functions to time, by name; each runs once beforehand to warm up.
        repeats: rounds at most.
        seconds: no new round is begun after so long; two rounds are run in any case.

    Returns:
        Times by name, one per round.
    """
    for run in work.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in work}
    begun = time.perf_counter()
    for i in range(repeats):
        if i >= 2 and time.perf_counter() - begun > seconds:
            break
        for name, run in work.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def environment() -> dict[str, Any]:
    """What a measurement depends on besides the code."""
    return {
        "kalman_attention": kalman_attention.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "engine": resolve("auto", torch.device("cpu"), torch.float32),
    }


def write_json(path: Path, what: str, settings: Mapping[str, Any], rows: Sequence[Any]) -> None:
    """Write a measurement with its surroundings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"what": what, "environment": environment(), "settings": settings, "rows": rows}
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
