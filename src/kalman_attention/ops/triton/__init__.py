"""Fused Triton kernels.

Importing this package does not import triton: the roofline asks for ``schedule`` without it, and
``ops/engines.py`` checks that it is installed before it asks for a function.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("forward", "backward", "step"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kalman_attention.ops.triton import bwd, fwd

    return bwd.backward if name == "backward" else getattr(fwd, name)
