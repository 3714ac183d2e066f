"""The programs: one source file, compiled for one arithmetic type and one thread layout."""

import itertools
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
        shared: for slots that share a variance.
        gaps: for time between tokens.
    """

    source: str
    type: str
    group: int
    shared: bool = False
    gaps: bool = False

    @property
    def name(self) -> str:
        """Such as ``fwd_float_4_shared``."""
        kind = "_shared" * self.shared + "_gaps" * self.gaps
        return f"{self.source}_{self.type}_{self.group}{kind}"

    @property
    def oversized(self) -> bool:
        """Whether its slots take more shared memory than there is; no call asks for it."""
        return self.shared and (self.source, self.type, self.group) == ("bwd", "float", 32)

    @property
    def path(self) -> Path:
        """The source file."""
        return CSRC / "cuda" / f"kla_scan_{self.source}.cu"

    @property
    def options(self) -> list[str]:
        """Flags that NVRTC and nvcc understand alike; IEEE division and denormals by default."""
        numbers = {"GROUP": self.group, "BLOCKS": int(self.shared), "GAPS": int(self.gaps)}
        defined = [f"-DKLA_{name}={value}" for name, value in numbers.items()]
        return ["-std=c++17", f"-DKLA_T={self.type}", *defined]


def program(
    source: str, dtype: torch.dtype, group: int, *, shared: bool = False, gaps: bool = False
) -> Program:
    """The program for an arithmetic dtype."""
    return Program(source, _TYPES[dtype], group, shared, gaps)


def every_program() -> Iterator[Program]:
    """All that a call may ask for."""
    yes_no = (False, True)
    for choice in itertools.product(("fwd", "bwd"), _TYPES.values(), GROUPS, yes_no, yes_no):
        found = Program(*choice)
        if not found.oversized:
            yield found
