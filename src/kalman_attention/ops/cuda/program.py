"""The programs: a source file compiled for one arithmetic type and one thread layout."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

CSRC = Path(__file__).parents[2] / "csrc"
GROUP_SIZES = (1, 2, 4, 8, 16, 32)
"""Threads that share a channel."""

_TYPES = {torch.float32: "float", torch.float64: "double"}


class Program(NamedTuple):
    """One compilation unit.

    Attributes:
        source: ``fwd`` or ``bwd``.
        type: arithmetic type in C.
        group: threads per channel.
        shared: whether slots share a variance.
        gaps: whether time passes between tokens.
    """

    source: str
    type: str
    group: int
    shared: bool = False
    gaps: bool = False

    @property
    def name(self) -> str:
        """A name such as ``fwd_float_4_shared``."""
        kind = "_shared" * self.shared + "_gaps" * self.gaps
        return f"{self.source}_{self.type}_{self.group}{kind}"

    @property
    def oversized(self) -> bool:
        """Whether it needs more shared memory than there is; no call uses such a program."""
        return self.shared and (self.source, self.type, self.group) == ("bwd", "float", 32)

    @property
    def path(self) -> Path:
        """The source file."""
        return CSRC / "cuda" / f"kla_scan_{self.source}.cu"

    @property
    def options(self) -> list[str]:
        """Flags for both NVRTC and nvcc; IEEE division and denormals are their defaults."""
        numbers = {"GROUP": self.group, "BLOCKS": int(self.shared), "GAPS": int(self.gaps)}
        defined = [f"-DKLA_{name}={value}" for name, value in numbers.items()]
        return ["-std=c++17", f"-DKLA_T={self.type}", *defined]


def program(
    source: str, dtype: torch.dtype, group: int, *, shared: bool = False, gaps: bool = False
) -> Program:
    """The program for an arithmetic dtype."""
    return Program(source, _TYPES[dtype], group, shared, gaps)


def every_program() -> Iterator[Program]:
    """All programs that a call may need."""
    yes_no = (False, True)
    for choice in itertools.product(("fwd", "bwd"), _TYPES.values(), GROUP_SIZES, yes_no, yes_no):
        found = Program(*choice)
        if not found.oversized:
            yield found
