"""Tools that examine the op instead of computing it, for commands and tests.

====================  ================================================================
``selfcheck``         random calls, and the error of an engine against the reference
``roofline``          bytes and operations of the Triton engine, and the time they imply
``engines``           the output of ``kla check``: which engines work here, and how exactly
``resources``         registers, spills and memory of a compiled GPU kernel
``triton_resources``  those of the Triton engine
``cuda_resources``    those of the CUDA engine
====================  ================================================================
"""

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""Architectures that the GPU engines are compiled for by default: A100, H100 and B200."""
