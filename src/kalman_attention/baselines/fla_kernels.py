"""The public GPU kernels of flash-linear-attention, used where they fit.

Never run on a GPU here: what is passed is held against the signatures of the installed version by
a test, and what comes back is checked only with a stand-in on CPU.
"""

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., tuple[Tensor, Tensor]]
"""Queries, keys, values, gates, state to outputs ``[B, T, H, V]`` and the last state."""


def fla_kernel(family: str, name: str, k: Tensor, v: Tensor) -> Rule | None:
    """The kernel ``fla.ops.<family>.<name>`` if it is installed and can take the call, else None.

    It can take tokens on a GPU, at least one, in float32 or shorter, with keys of 256 channels.
    """
    if not v.is_cuda or v.dtype == torch.float64 or v.shape[1] == 0 or k.shape[-1] > 256:
        return None
    kernel = _load(family, name)
    return None if kernel is None else partial(_call, kernel)


def _call(
    kernel: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *gates_and_state: Tensor
) -> tuple[Tensor, Tensor]:
    *gates, state = gates_and_state
    y, last = kernel(
        *(x.to(v.dtype) for x in (q, k, v)),
        *gates,
        scale=1.0,
        initial_state=state.float(),
        output_final_state=True,
    )
    return y, last


@cache
def _load(family: str, name: str) -> Callable[..., Any] | None:
    try:
        kernel: Callable[..., Any] = getattr(importlib.import_module(f"fla.ops.{family}"), name)
    except ImportError:
        return None
    return kernel
