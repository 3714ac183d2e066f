"""The CUDA kernel of the package ``mamba_ssm``, where it is installed and can serve the call.

Written from its documentation and never run on a GPU. Without the package, or for calls that it
cannot serve (a state to go on from, padding, packed documents, float64), ``linear_scan`` runs.
"""

import functools
import importlib.util
from typing import Any

import torch

from kalman_attention._typing import Dynamics, Keys, Values
from kalman_attention.ops.linear_scan import LinearScanOutput


def serves(u: Values) -> bool:
    """Whether the kernel can take a whole sequence ``[B, T, D]`` from an empty state."""
    return u.is_cuda and u.shape[1] > 0 and u.dtype != torch.float64 and _installed()


def selective_scan(u: Values, dt: Values, B: Keys, C: Keys, A: Dynamics) -> LinearScanOutput:
    """``linear_scan`` from an empty state, by the kernel.

    The kernel has no gradient for the last state: it comes out detached.

    Args:
        u: inputs, ``[B, T, D]``.
        dt: step sizes, ``[B, T, D]``.
        B: input operators, ``[B, T, N]``.
        C: read-out operators, ``[B, T, N]``.
        A: decay rates, ``[N, D]``.
    """
    along_time = [x.transpose(1, 2).contiguous() for x in (u, dt.to(u.dtype), B, C)]
    x, steps, inputs, outputs = along_time  # [B, D, T] twice, [B, N, T] twice
    y, last = _kernel()(x, steps, A.T.contiguous(), inputs, outputs, return_last_state=True)
    return LinearScanOutput(y.transpose(1, 2), last.detach().transpose(1, 2))


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("mamba_ssm") is not None


def _kernel() -> Any:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    return selective_scan_fn
