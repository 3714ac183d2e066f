"""What examines the op instead of computing it, for commands and tests.

====================  ================================================================
``selfcheck``         random calls, and the error of an engine against the reference
``roofline``          bytes and operations of the Triton engine, and what they allow
``resources``         what a compiled GPU kernel needs; one module for each engine
====================  ================================================================
"""
