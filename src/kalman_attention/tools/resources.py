"""The resources that a compiled GPU kernel needs, as reported by the assembler."""

from typing import NamedTuple


class KernelResources(NamedTuple):
    """One kernel variant compiled for one architecture.

    Attributes:
        kernel: name of the kernel.
        variant: dtype, schedule and block sizes.
        architecture: such as ``sm_80``.
        registers: registers per thread.
        spill_bytes: bytes of stores and loads of spilled registers, per thread.
        shared_bytes: static shared memory per block.
    """

    kernel: str
    variant: str
    architecture: str
    registers: int
    spill_bytes: int
    shared_bytes: int
