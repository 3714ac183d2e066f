"""Compile every program ahead of time with nvcc and collect what ptxas reports on its kernels."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kalman_attention.ops.cuda.program import Program, every_program
from kalman_attention.tools.resources import KernelResources

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def resources(
    architectures: Sequence[str], programs: Iterable[Program] | None = None
) -> list[KernelResources]:
    """Registers, spills and shared memory of every kernel variant.

    Args:
        architectures: such as ``["sm_80", "sm_90"]``.
        programs: programs to compile; None for all that a call may need.

    Raises:
        RuntimeError: nvcc is missing or fails.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise RuntimeError(
            "nvcc is not on PATH. It comes with the CUDA toolkit (12.8 or newer for sm_100); "
            "running the engine does not need it."
        )
    todo = [(p, a) for p in programs or every_program() for a in architectures]
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        found = workers.map(lambda job: _compile(nvcc, *job), todo)
        return [kernel for kernels in found for kernel in kernels]


def _compile(nvcc: str, program: Program, architecture: str) -> list[KernelResources]:
    with tempfile.TemporaryDirectory() as folder:
        flags = [*program.options, f"-arch={architecture}", "-cubin", "-Xptxas", "-v"]
        command = [nvcc, *flags, "-o", str(Path(folder) / "kernel.cubin"), str(program.path)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc cannot compile {program.name}: {done.stderr}")
    return list(_parse(done.stderr, program, architecture))


def _parse(log: str, program: Program, architecture: str) -> Iterator[KernelResources]:
    kind = ", shared variances" * program.shared + ", gaps" * program.gaps
    variant = f"{program.type}, {program.group} threads per channel{kind}"
    entry, spills = "", 0
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = match[1]
        elif match := _SPILLS.search(line):
            spills = int(match[1]) + int(match[2])
        elif match := _USED.search(line):
            shared = _SHARED.search(line)
            held = int(shared[1]) if shared else 0
            yield KernelResources(entry, variant, architecture, int(match[1]), spills, held)
