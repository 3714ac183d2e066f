"""The fused first-order scan of the native engine, for baselines: Mamba's selective scan.

With state h ``[R, N, D]``: ``h' = exp(dt A) h + dt B x`` and ``y = sum_n C h'``.
"""

import torch
from torch import Tensor

from kalman_attention.ops.contract import (
    LinearScanGrads,
    LinearScanInputs,
    LinearScanResult,
    ScanInputs,
    compute_dtype,
)
from kalman_attention.ops.cpu.abi import (
    LINEAR,
    Outputs,
    run_backward,
    run_forward,
)


def linear_forward(
    inputs: LinearScanInputs, *, save: bool, isa: str = "auto", pool: str = "auto"
) -> LinearScanResult:
    """Scan every row.

    Args:
        inputs: validated arguments on the CPU.
        save: save the state before each chunk, for ``linear_backward``.
        isa: instruction set, for tests.
        pool: thread pool, for tests.

    Returns:
        Outputs, final states and checkpoints.
    """
    call = _call(inputs)
    y = torch.empty(inputs.x.shape, dtype=inputs.x.dtype)
    h = torch.empty_like(call.mean_0)
    checkpoints = call.new_checkpoints(h.dtype, fields=1) if save else None
    run_forward(LINEAR, call, Outputs(y=y, mean=h, checkpoints=checkpoints), isa, pool)
    return LinearScanResult(y, h, checkpoints)


def linear_backward(
    inputs: LinearScanInputs,
    checkpoints: Tensor,
    dy: Tensor | None,
    dh: Tensor | None,
    *,
    isa: str = "auto",
    pool: str = "auto",
) -> LinearScanGrads:
    """Exact gradients with respect to the six floating inputs.

    Args:
        inputs: the arguments of the forward pass.
        checkpoints: the states that it saved.
        dy: gradient with respect to y; None means 0.
        dh: gradient with respect to the final state; None means 0.
        isa: instruction set, for tests.
        pool: thread pool, for tests.

    Returns:
        Gradients in the shapes and dtypes of the inputs.
    """
    call = _call(inputs)
    x, dt, B, C, A, h_0 = (
        torch.empty(t.shape, dtype=t.dtype)
        for t in (inputs.x, inputs.dt, inputs.B, inputs.C, call.a_bar, call.mean_0)
    )
    grads = (C, B, x, dt, A, None, h_0, None, None)
    run_backward(LINEAR, call, checkpoints, (dy, None, dh, None), grads, isa, pool)
    found = LinearScanGrads(x, dt, A, B, C, h_0)
    return LinearScanGrads(*(g.to(t.dtype) for g, t in zip(found, inputs[:6], strict=True)))


def _call(inputs: LinearScanInputs) -> ScanInputs:
    """The call in the fields of ``ScanInputs``, as ``csrc/kla_scan.h`` assigns them."""
    # The kernel reads neither p_bar nor variance_0 of this model: A and h_0 are placeholders.
    x, dt, A, B, C, h_0, mask, cu_seqlens = inputs
    call = ScanInputs(C, B, x, dt, A, A, h_0, h_0, mask, cu_seqlens)
    return call.dense(compute_dtype(x.dtype))
