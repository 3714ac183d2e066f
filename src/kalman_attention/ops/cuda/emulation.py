"""The same kernels compiled for the host, so that tests run them without a device.

The environment variable ``KLA_CUDA_EMULATION`` names the library that ``make test-cuda`` builds.
Then, and only then, engine ``cuda`` takes CPU tensors; ``auto`` never picks it for them.
"""

import ctypes
import functools
import os

import torch

from kalman_attention.ops.cuda.program import Program

LIBRARY = os.environ.get("KLA_CUDA_EMULATION", "")
"""Path of the library, or nothing."""

SEED = int(os.environ.get("KLA_CUDA_EMULATION_SEED", "0"))
"""Other than 0: threads take turns in a random order, which reveals missing barriers."""

_ERRORS = {
    1: "it has no such kernel",
    2: "the library is of another version; build it again",
    3: "the threads of a block wait for one another for ever",
}


def launch(
    program: Program, kernel: str, blocks: int, threads: int, params: bytes, device: torch.device
) -> None:
    """Run a kernel, block after block.

    Raises:
        RuntimeError: the library does not know the kernel, or the kernel hangs.
    """
    assert device.type == "cpu"
    name = (program.name.encode(), kernel.encode())
    status = _library().kla_emulate(*name, blocks, threads, params, len(params), SEED)
    if status != 0:
        raise RuntimeError(f"emulated kernel {kernel} of {program.name}: {_ERRORS[status]}")


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(LIBRARY)
    words = (ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint64)
    library.kla_emulate.argtypes = [ctypes.c_char_p, ctypes.c_char_p, *words]
    return library
