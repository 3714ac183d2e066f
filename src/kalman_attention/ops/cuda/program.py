"""The programs: one source file, compiled for one arithmetic type and one thread layout."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

CSRC = Path(__file__).parents[2] / "csrc"
GROUPS = (1, 2, 4, 8, 16, 32)
"""Threads that share a channel."""

_TYPES = {torch.float32: "float", torch.float64: "double"}


class Program(NamedTuple):
    """What is compiled at once.

    Attributes:
        source: ``fwd`` or ``bwd``.
        type: arithmetic type in C.
        group: threads per channel.
    """

    source: str
    type: str
    group: int

    @property
    def name(self) -> str:
        """Such as ``fwd_float_4``."""
        return f"{self.source}_{self.type}_{self.group}"

    @property
    def path(self) -> Path:
        """The source file."""
        return CSRC / "cuda" / f"kla_scan_{self.source}.cu"

    @property
    def options(self) -> list[str]:
        """Flags that NVRTC and nvcc understand alike; IEEE division and denormals by default."""
        return ["-std=c++17", f"-DKLA_T={self.type}", f"-DKLA_GROUP={self.group}"]


def program(source: str, dtype: torch.dtype, group: int) -> Program:
    """The program for an arithmetic dtype."""
    return Program(source, _TYPES[dtype], group)


def every_program() -> Iterator[Program]:
    """All that a call may ask for."""
    for source in ("fwd", "bwd"):
        for type_name in _TYPES.values():
            for group in GROUPS:
                yield Program(source, type_name, group)
