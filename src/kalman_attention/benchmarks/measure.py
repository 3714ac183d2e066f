"""How the benchmarks measure: interleaved minimum of times, peak memory in a child process.

On a GPU times are those between two events of its stream, and memory is what torch allocated.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kalman_attention import kla_scan
from kalman_attention._processes import worker_processes
from kalman_attention.recipes.machine import about


class Shape(NamedTuple):
    """Sizes of one scan."""

    B: int
    T: int
    D: int
    N: int

    def __str__(self) -> str:
        return f"B={self.B} T={self.T} D={self.D} N={self.N}"


CPU = torch.device("cpu")


def make_inputs(shape: Shape, *, grad: bool, device: torch.device = CPU) -> list[Tensor]:
    """Arguments of a scan as a trained layer would give them: q, k, v, lam_v, a_bar, p_bar."""
    B, T, D, N = shape
    generator = torch.Generator().manual_seed(0)

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator)

    tensors = [
        (uniform(B, T, N) - 0.5) / N**0.5,
        (uniform(B, T, N) - 0.5) / N**0.5,
        uniform(B, T, D) - 0.5,
        0.1 + 2.0 * uniform(B, T, D),
        0.9 + 0.0999 * uniform(N, D),
        0.001 + 0.009 * uniform(N, D),
    ]
    return [x.to(device).requires_grad_(grad) for x in tensors]


def scan_pass(inputs: list[Tensor], engine: str, *, backward: bool) -> Callable[[], None]:
    """One forward pass, or one forward and backward pass, ready to be timed."""
    if not backward:

        def forward_only() -> None:
            with torch.no_grad():
                kla_scan(*inputs, engine=engine)

        return forward_only
    upstream = torch.ones_like(inputs[2])  # y has the shape of v

    def forward_backward() -> None:
        torch.autograd.grad(kla_scan(*inputs, engine=engine).y, inputs, upstream)

    return forward_backward


def layer_pass(layer: nn.Module, inputs: list[Tensor], *, backward: bool) -> Callable[[], None]:
    """One forward pass of a layer, or one forward and backward pass, ready to be timed.

    Args:
        layer: any module that returns a tensor or a tuple of tensors.
        inputs: its arguments.
        backward: whether to differentiate, in the inputs and the parameters.
    """

    def forward() -> tuple[Tensor, ...]:
        found = layer(*inputs)
        return found if isinstance(found, tuple) else (found,)

    def without_gradients() -> None:
        with torch.no_grad():
            forward()

    def with_gradients() -> None:
        torch.autograd.backward(forward(), gradients)
        layer.zero_grad()

    if not backward:
        return without_gradients
    inputs = [x.requires_grad_() for x in inputs]
    with torch.no_grad():
        gradients = [torch.randn_like(y) for y in forward()]
    return with_gradients


def fastest(
    runs: Mapping[str, Callable[[], None]],
    *,
    seconds: float = 4.0,
    most: int = 60,
    device: torch.device = CPU,
) -> dict[str, float]:
    """Least time of each run in seconds, taken in turns so that all see the same machine.

    Args:
        runs: what to time, by name; each is called once before the clock starts.
        seconds: stop after a round when this much time has passed (at least two rounds).
        most: at most this many rounds.
        device: where the runs do their work.
    """
    clock = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    for call in runs.values():
        call()
    least = dict.fromkeys(runs, float("inf"))
    began = time.perf_counter()
    for turn in range(most):
        for name, call in runs.items():
            least[name] = min(least[name], clock(call))
        if turn >= 1 and time.perf_counter() - began > seconds:
            break
    return least


def _cpu_seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _gpu_seconds(call: Callable[[], None]) -> float:
    begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))


def peak_memory(
    shape: Shape, engine: str, *, backward: bool, device: torch.device = CPU
) -> int | None:
    """Bytes that one pass needs beyond its inputs, by a child process; None if it died."""
    job = _MemoryJob(shape, engine, backward, torch.get_num_threads(), device.type)
    try:
        with worker_processes(1) as workers:
            ((_, found),) = workers.in_order(_measure_in_child, [job])
    except (ChildProcessError, MemoryError, RuntimeError):  # torch raises RuntimeError for memory
        return None
    return found


def available_memory(device: torch.device = CPU) -> int:
    """Bytes of memory that can still be had."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kib = dict(line.split(":") for line in lines)["MemAvailable"].split()[0]
    return int(kib) * 1024  # free pages and those of files, which make room


def save_results(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON, with the machine and the versions they belong to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about(), **results}, indent=2) + "\n", encoding="utf-8")


class _MemoryJob(NamedTuple):
    shape: Shape
    engine: str
    backward: bool
    threads: int
    device: str


def _measure_in_child(job: _MemoryJob) -> int:
    torch.set_num_threads(job.threads)
    device = torch.device(job.device)
    small = make_inputs(Shape(1, 64, 8, 2), grad=job.backward, device=device)
    # A first small call, so that libraries and threads are not counted.
    scan_pass(small, job.engine, backward=job.backward)()
    inputs = make_inputs(job.shape, grad=job.backward, device=device)
    call = scan_pass(inputs, job.engine, backward=job.backward)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - held
    before = _resident("VmRSS")
    call()
    return max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    """Resident bytes now (VmRSS) or at most so far (VmHWM).

    Not ru_maxrss where it can be avoided: on Linux a child inherits its parent's.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(x for x in status.read_text().splitlines() if x.startswith(field))
    return 1024 * int(line.split()[1])
