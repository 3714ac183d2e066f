"""Find and load the shared library of the native CPU engine, or say why that fails.

Importing this module never fails; the library is opened when it is first needed.
"""

import ctypes
import functools
import os
from pathlib import Path
from typing import NamedTuple

import torch

ABI_VERSION = 9
LIBRARY = Path(os.environ.get("KLA_CPU_LIBRARY") or Path(__file__).with_name("_kla_cpu.so"))
"""The shared library; the environment variable names another build, such as one with sanitizers."""
ISA = {"auto": 0, "baseline": 1, "avx2": 2, "avx512": 3}
POOL = {"auto": 0, "threads": 1, "openmp": 2}

_MEMORY_ERROR = 4


class Info(NamedTuple):
    """Properties of the native engine, for ``kla check``.

    Attributes:
        library: path of the shared library.
        abi: version of its C interface.
        isa: instruction set in use.
        isas: all instruction sets that this processor supports, narrowest first.
        pool: ``openmp`` (torch's own threads) or ``threads`` (new threads per call).
        threads: upper bound on threads per call.
    """

    library: str
    abi: int
    isa: str
    isas: tuple[str, ...]
    pool: str
    threads: int


def why_not() -> str | None:
    """One sentence on why the native engine cannot run here and what to do, or None if it can."""
    try:
        load()
    except OSError as error:
        return str(error)
    return None


def info() -> Info:
    """Describe the loaded library.

    Returns:
        Path, versions, instruction sets and threads.

    Raises:
        OSError: the library is missing or unusable; ``why_not`` has the same text.
    """
    library = load()
    available = library.kla_isa_available()
    isas = tuple(name for name, value in ISA.items() if value and available >> value & 1)
    pool = {value: name for name, value in POOL.items()}[library.kla_pool_in_use()]
    threads = torch.get_num_threads()
    return Info(str(LIBRARY), library.kla_abi_version(), isas[-1], isas, pool, threads)


def load() -> ctypes.CDLL:
    """The shared library, opened once.

    Raises:
        OSError: it is missing, cannot be opened, or is of another version.
    """
    library, reason = _open()
    if library is None:
        raise OSError(reason)
    return library


def check(status: int) -> None:
    """Raise an exception if a status of the library is not success.

    Raises:
        MemoryError: an allocation failed.
        RuntimeError: anything else but success.
    """
    if status == 0:
        return
    text = load().kla_status_text(status).decode()
    if status == _MEMORY_ERROR:
        raise MemoryError(f"native CPU engine: {text}")
    raise RuntimeError(f"native CPU engine: {text}")


@functools.cache
def _open() -> tuple[ctypes.CDLL | None, str]:
    again = (
        "to build it, put a C++17 compiler (g++ or clang++) on the path and run `pip install "
        "--force-reinstall --no-deps .` in the source folder"
    )
    if not LIBRARY.exists():
        where = f"{LIBRARY.name} is missing"
        if os.environ.get("KLA_CPU_LIBRARY"):
            where = f"KLA_CPU_LIBRARY is set, but {LIBRARY} does not exist"
        return None, f"the native library was not built ({where}); {again}"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return None, f"the native library cannot be opened ({error}); {again}"
    library.kla_abi_version.restype = ctypes.c_int64
    found = library.kla_abi_version()
    if found != ABI_VERSION:
        return (
            None,
            f"the native library has ABI {found}, this package needs {ABI_VERSION}; {again}",
        )
    library.kla_isa_available.restype = ctypes.c_int64
    library.kla_pool_in_use.restype = ctypes.c_int64
    library.kla_status_text.restype = ctypes.c_char_p
    library.kla_status_text.argtypes = [ctypes.c_int]
    library.kla_conv_forward.argtypes = [ctypes.c_char_p]
    library.kla_conv_backward.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.kla_frames_forward.argtypes = [ctypes.c_char_p]
    library.kla_frames_backward.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.kla_scan_forward.argtypes = [ctypes.c_char_p]
    library.kla_scan_backward.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.kla_scan_smooth.argtypes = [ctypes.c_char_p]
    library.kla_scan_smooth_backward.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.kla_scan_filter_map.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    library.kla_scan_adjoint_map.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
    library.kla_softplus_forward.argtypes = [ctypes.c_char_p]
    library.kla_softplus_backward.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.kla_norm_forward.argtypes = [ctypes.c_char_p]
    library.kla_norm_backward.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.kla_memory_forward.argtypes = [ctypes.c_char_p]
    library.kla_memory_backward.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.kla_product.argtypes = [ctypes.c_char_p]
    library.kla_layer_step.argtypes = [ctypes.c_char_p]
    return library, ""
