"""What examines the op instead of computing it, for commands and tests.

====================  ================================================================
``selfcheck``         random calls, and the error of an engine against the reference
``roofline``          bytes and operations of the Triton engine, and what they allow
``engines``           what ``kla check`` prints: which engines work here, and how exact
``resources``         what a compiled GPU kernel needs; one module for each engine
====================  ================================================================
"""

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
"""What the GPU engines are compiled for by default: A100, H100 and B200."""
