"""The kernels compile for devices that are not here: by NVRTC as at run time, and by nvcc."""

import contextlib
import ctypes
import os
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kalman_attention.ops.cuda import device
from kalman_attention.ops.cuda.program import GROUP_SIZES, Program, every_program
from kalman_attention.tools.cuda_resources import _parse, resources
from kalman_attention.tools.resources import KernelResources

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SMALL = Program("fwd", "float", 4)
EVERYTHING = "KLA_TEST_COMPILE" in os.environ
"""All programs take minutes."""

BUILDS = (
    [
        (program, arch)
        for program in every_program()
        for arch in ARCHITECTURES
        if arch == "sm_90" or not (program.shared or program.gaps)
    ]
    if EVERYTHING
    else [(SMALL, "sm_90"), (SMALL._replace(shared=True, gaps=True), "sm_90")]
)
LOG = """
ptxas info    : Compiling entry function 'kla_forward' for 'sm_80'
ptxas info    : Function properties for kla_forward
    8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 12320 bytes smem, 872 bytes cmem[0]
ptxas info    : Compiling entry function 'kla_link' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 0 barriers, 872 bytes cmem[0]
"""


@pytest.mark.parametrize(("program", "architecture"), BUILDS, ids=lambda x: getattr(x, "name", x))
def test_nvrtc_compiles(program: Program, architecture: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
    try:
        cubin = device.compile_program(program, architecture)
    except RuntimeError as error:
        if "nvrtc" not in str(error).lower() or "compile" in str(error):
            raise
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    assert cubin.startswith(b"\x7fELF")
    assert b"kla_link" in cubin


def test_every_program_is_there() -> None:
    programs = list(every_program())
    assert len(programs) == 2 * 2 * len(GROUP_SIZES) * 4 - 2  # two are too large
    assert all(program.path.exists() for program in programs)


def test_the_words_of_ptxas_are_understood() -> None:
    forward, link = _parse(LOG, SMALL, "sm_80")
    variant = "float, 4 threads per channel"
    assert forward == KernelResources("kla_forward", variant, "sm_80", 64, 20, 12320)
    assert link == KernelResources("kla_link", variant, "sm_80", 48, 0, 0)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_nothing_spills() -> None:
    found = resources(["sm_80"], [SMALL] if not EVERYTHING else None)
    assert {x.kernel for x in found} >= {"kla_forward", "kla_summarise", "kla_link", "kla_step"}
    assert not [x for x in found if x.spill_bytes]
    assert max(x.shared_bytes for x in found) <= 48 * 1024


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="nvcc is not on PATH"):
        resources(["sm_80"])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "kalman_attention[cuda]" in str(device.why_not())


def test_cpu_tensors_are_refused_without_the_emulation() -> None:
    from dataclasses import replace

    from kalman_attention.ops.engines import ENGINES

    engine = replace(ENGINES["cuda"], devices=("cuda",), missing=None)
    assert "runs on cuda tensors" in str(engine.why_not(torch.device("cpu"), torch.float32))
    assert engine.why_not(torch.device("cuda"), torch.float32) is None


def test_a_launch_passes_the_struct_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a driver that only writes down what it is asked to do: no device is here."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    asked: dict[str, Any] = {}

    def launch(function: Any, *numbers: int) -> tuple[int]:
        (address,) = ctypes.cast(numbers[8], ctypes.POINTER(ctypes.c_void_p * 1)).contents
        asked.update(function=function, numbers=numbers, params=ctypes.string_at(address, 24))
        return (0,)

    fakes = {
        "cuLibraryLoadData": lambda cubin, *options: (0, f"library of {cubin!r}"),
        "cuLibraryGetKernel": lambda library, name: (0, f"{name!r} in {library}"),
        "cuKernelGetFunction": lambda kernel: (0, kernel),
        "cuLaunchKernel": launch,
    }
    for name, fake in fakes.items():
        assert callable(getattr(driver, name))
        monkeypatch.setattr(driver, name, fake)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda i: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (9, 0))
    monkeypatch.setattr(device, "compile_program", lambda program, arch: f"{program.name} {arch}")
    params = bytes(range(24))
    try:
        device.launch(SMALL, "kla_link", 5, 128, params, torch.device("cuda:1"))
    finally:
        device._function.cache_clear()
        device._library.cache_clear()
    assert asked["params"] == params
    assert asked["function"] == "b'kla_link' in library of 'fwd_float_4 sm_90'"
    assert asked["numbers"][:8] == (5, 1, 1, 128, 1, 1, 0, 7)
    assert asked["numbers"][9] == 0


def test_errors_of_the_driver_are_raised() -> None:
    with pytest.raises(RuntimeError, match=r"driver: .*INVALID"):
        device._checked(SimpleNamespace(__name__="cuda.bindings.driver"), (_Invalid(),))


class _Invalid:
    def __int__(self) -> int:
        return 1

    def __str__(self) -> str:
        return "CUDA_ERROR_INVALID_VALUE"
