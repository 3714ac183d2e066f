"""Launches kernels: compiled at run time for the device, or emulated on the host for tests.

On a device, NVRTC compiles the programs and the driver launches their kernels on torch's current
stream, both through NVIDIA's ``cuda-bindings``: no torch C++ interface, no toolkit, one wheel for
every device. This has never run on a GPU; docs/engines.md says what has been tested instead.

The emulation runs the same kernels, compiled for the host. The environment variable
``KLA_CUDA_EMULATION`` names the library that ``make test-cuda`` builds. Only then does engine
``cuda`` take CPU tensors; ``auto`` never picks it for them.
"""

import ctypes
import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from kalman_attention.ops.cuda.program import CSRC, Program

EMULATION = os.environ.get("KLA_CUDA_EMULATION", "")
"""Path of the emulated kernels, or an empty string."""

SEED = int(os.environ.get("KLA_CUDA_EMULATION_SEED", "0"))
"""Other than 0: emulated threads take turns in a random order, which reveals missing barriers."""

_ERRORS = {
    1: "it has no such kernel",
    2: "the library is of another version; build it again",
    3: "the threads of a block are deadlocked",
}
_INSTALL = "pip install 'kalman_attention[cuda]'"


def why_not() -> str | None:
    """What is missing to compile and launch, or None; determined without importing anything."""
    spec = importlib.util.find_spec("cuda")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    if not any((Path(place) / "bindings").is_dir() for place in places):
        return f"the package cuda-bindings is missing; {_INSTALL}"
    return None


def compile_program(program: Program, architecture: str) -> bytes:
    """The cubin of a program; needs no device.

    Args:
        program: what to compile.
        architecture: such as ``sm_90``.

    Raises:
        RuntimeError: NVRTC cannot compile it; the message contains its log.
    """
    from cuda.bindings import nvrtc

    source, name = program.path.read_bytes(), program.path.name.encode()
    handle = _checked(nvrtc, nvrtc.nvrtcCreateProgram(source, name, 0, [], []))
    include = f"--include-path={CSRC / 'cuda'}"
    options = [
        x.encode() for x in (*program.options, include, f"--gpu-architecture={architecture}")
    ]
    try:
        (error,) = nvrtc.nvrtcCompileProgram(handle, len(options), options)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(handle)))
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(handle, log))
            raise RuntimeError(f"NVRTC cannot compile {program.name}: {log.decode()}")
        cubin = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(handle)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(handle, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return bytes(cubin)


def launch(
    program: Program, kernel: str, blocks: int, threads: int, params: bytes, device: torch.device
) -> None:
    """Launch a kernel on torch's current stream of ``device``."""
    from cuda.bindings import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        function = _function(program, kernel, index)
        stream = torch.cuda.current_stream(index).cuda_stream
        # The driver copies the struct before it returns.
        struct = ctypes.create_string_buffer(params, len(params))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(struct))
        grid, block = (blocks, 1, 1), (threads, 1, 1)
        result = driver.cuLaunchKernel(
            function, *grid, *block, 0, stream, ctypes.addressof(arguments), 0
        )
        _checked(driver, result)


@functools.cache
def _function(program: Program, kernel: str, device: int) -> Any:
    """The driver's handle of a kernel in the context of one device."""
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    library = _library(program, f"sm_{major}{minor}")
    found = _checked(driver, driver.cuLibraryGetKernel(library, kernel.encode()))
    return _checked(driver, driver.cuKernelGetFunction(found))


@functools.cache
def _library(program: Program, architecture: str) -> Any:
    from cuda.bindings import driver

    cubin = compile_program(program, architecture)
    return _checked(driver, driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))


def _checked(api: Any, result: tuple[Any, ...]) -> Any:
    """The result of a call to NVRTC or to the driver; raises if it reports an error."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"{api.__name__.rpartition('.')[2]}: {error}")
    return values[0] if values else None


def emulate(
    program: Program, kernel: str, blocks: int, threads: int, params: bytes, device: torch.device
) -> None:
    """Run an emulated kernel, block after block.

    Raises:
        RuntimeError: the library has no such kernel, or the kernel deadlocks.
    """
    assert device.type == "cpu"
    name = (program.name.encode(), kernel.encode())
    status = _emulation().kla_emulate(*name, blocks, threads, params, len(params), SEED)
    if status != 0:
        raise RuntimeError(f"emulated kernel {kernel} of {program.name}: {_ERRORS[status]}")


@functools.cache
def _emulation() -> ctypes.CDLL:
    library = ctypes.CDLL(EMULATION)
    words = (ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint64)
    library.kla_emulate.argtypes = [ctypes.c_char_p, ctypes.c_char_p, *words]
    return library
