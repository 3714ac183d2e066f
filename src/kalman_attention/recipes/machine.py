"""The machine: its description in result files, and its memory allocator."""

import ctypes
import datetime
import platform
from pathlib import Path


def about() -> dict[str, str | int | None]:
    """The description of software and hardware in every result file."""
    # Imported here, so that `kla --help` does not wait for them.
    import importlib.metadata

    import torch

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "kalman_attention": importlib.metadata.version("kalman_attention"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def keep_memory() -> bool:
    """Make the C library keep freed memory: returning it costs a page fault for every 4 KiB.

    That is up to a sixth of the time of a small model on a CPU. Allocators such as jemalloc keep
    memory anyway; among the common C libraries only glibc has the option. Returns whether it was
    set.
    """
    trim_threshold, mmap_max = -1, -4
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, 2**31 - 1))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()
