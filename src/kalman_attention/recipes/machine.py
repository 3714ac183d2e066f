"""Which machine and which versions a result belongs to."""

import datetime
import importlib.metadata
import platform
from pathlib import Path

import torch


def about() -> dict[str, str | int | None]:
    """What every result file says of its origin."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "kalman_attention": importlib.metadata.version("kalman_attention"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()
