"""How the benchmarks measure: the minimum of interleaved times, peak memory in a child process.

On a GPU, times are taken between two events of its stream, and memory is what torch allocates.
"""

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
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
PASSES = {"forward": False, "forward + backward": True}
"""The passes that are timed, and whether they differentiate."""


@contextlib.contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Let torch use a number of threads inside the context; None leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_inputs(shape: Shape, *, grad: bool, device: torch.device = CPU) -> list[Tensor]:
    """Random arguments of a scan in the range of a trained layer: q, k, v, lam_v, a_bar, p_bar."""
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
        # Noise in every slot: a single one without it takes the whole call to float64, which is
        # half as fast (``ops/arithmetic.py``).
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
        layer: a module that returns a tensor or a tuple of tensors.
        inputs: its arguments.
        backward: whether to compute gradients with respect to inputs and parameters.
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
    """Minimum time of each run in seconds; runs take turns, so that all see the same machine.

    Args:
        runs: what to time, by name; each is called once as a warm-up.
        seconds: stop after the round in which this time is up, but not before the second round.
        most: maximum number of rounds.
        device: device that the runs use.
    """
    clock = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    for call in runs.values():
        call()
    least = dict.fromkeys(runs, float("inf"))
    began = time.perf_counter()
    for turn in range(most):
        for name, call in runs.items():
            least[name] = min(least[name], clock(call))
        # At least two rounds, so that there is a minimum to take.
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
    """Peak bytes of one pass beyond its inputs, from a child process; None if that died."""
    job = _MemoryJob(shape, engine, backward, torch.get_num_threads(), device.type)
    try:
        with worker_processes(1) as workers:
            ((_, found),) = workers.in_order(_measure_in_child, [job])
    except (ChildProcessError, MemoryError, RuntimeError):  # torch raises RuntimeError for memory
        return None
    return found


def available_memory(device: torch.device = CPU) -> int:
    """Bytes of memory that are still available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kib = dict(line.split(":") for line in lines)["MemAvailable"].split()[0]
    return int(kib) * 1024  # free pages, and cached files that can be dropped


def save_results(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON, together with the machine and the versions of libraries."""
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
    # A small call first, so that loading libraries and starting threads is not counted.
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
    """Resident bytes at present (VmRSS) or their maximum so far (VmHWM).

    Not ``ru_maxrss`` where it can be avoided: on Linux a child inherits that of its parent.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(x for x in status.read_text().splitlines() if x.startswith(field))
    return 1024 * int(line.split()[1])
