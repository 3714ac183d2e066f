"""What a compiled GPU kernel needs of a multiprocessor, as its assembler reports it."""

from typing import NamedTuple


class KernelResources(NamedTuple):
    """One kernel variant compiled for one architecture.

    Attributes:
        kernel: name of the kernel.
        variant: what distinguishes it: dtype, schedule, block sizes.
        architecture: such as ``sm_80``.
        registers: per thread.
        spill_bytes: stores and loads of spilled registers, per thread.
        shared_bytes: static shared memory per block.
    """

    kernel: str
    variant: str
    architecture: str
    registers: int
    spill_bytes: int
    shared_bytes: int
