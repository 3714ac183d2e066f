"""Forward, backward and single step of the CUDA engine, as the engine contract requires."""

import torch
from torch import Tensor

from kalman_attention.filtering.segment import AdjointMap, FilterMap
from kalman_attention.ops.contract import ScanGrads, ScanInputs, ScanResult, dense, rows
from kalman_attention.ops.cuda.grid import (
    LARGEST_BLOCK,
    LINK_THREADS,
    STEP,
    SUM_THREADS,
    Grid,
    backward_grid,
    forward_grid,
)
from kalman_attention.ops.cuda.params import Params, launch, prepare
from kalman_attention.ops.cuda.program import Program, program

# 256 MiB: enough for one launch at the usual sizes, and a small part of the memory of any GPU.
PART_BYTES = 2**28
"""Memory for dk and dq per channel block; calls that need more process channels in waves."""


def forward(inputs: ScanInputs, *, return_variance: bool, save: bool) -> ScanResult:
    """Filter every row.

    Args:
        inputs: validated arguments.
        return_variance: also compute y_var.
        save: save the belief before each chunk, for ``backward``.

    Returns:
        Outputs, final beliefs and checkpoints.
    """
    _require_small_blocks(inputs)
    dtype = inputs.arithmetic_dtype
    grid = forward_grid(inputs)
    unit, params = _program("fwd", dtype, grid, inputs), prepare(inputs, grid, dtype)
    params = _with_outputs(params, inputs.v, return_variance)
    if save:
        params = params._replace(checkpoints=inputs.new_checkpoints(dtype))
    if grid.split(params.R):
        params = params._replace(
            summaries=_lanes(params, len(FilterMap._fields)), borders=_lanes(params, 2)
        )
        _each_round(unit, "kla_summarise", grid, params)
        _each(unit, "kla_link", params, params.R * params.N)
    if grid.slots < params.G * params.places:
        params = params._replace(channel_sums=_tokens(params, 1 + return_variance))
    _each_round(unit, "kla_forward" + "_variance" * return_variance, grid, params)
    return _result(inputs, params)


def backward(
    inputs: ScanInputs,
    checkpoints: Tensor,
    dy: Tensor | None,
    dy_var: Tensor | None,
    dmean: Tensor | None,
    dvariance: Tensor | None,
) -> ScanGrads:
    """Exact gradients with respect to the floating inputs; see ``EngineModule.backward``."""
    dtype = inputs.arithmetic_dtype
    grid = backward_grid(inputs, dtype)
    unit, params = _program("bwd", dtype, grid, inputs), prepare(inputs, grid, dtype)
    floats = (*inputs[:4], params.a_bar, params.p_bar, params.mean_0, params.variance_0)
    grads = ScanGrads(*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in floats))
    params = params._replace(
        checkpoints=dense(checkpoints, dtype),
        dy=None if dy is None else rows(dy),
        dy_var=None if dy_var is None else rows(dy_var),
        dmean=None if dmean is None else dense(dmean, dtype),
        dvariance=None if dvariance is None else dense(dvariance, dtype),
        **{f"d{name}": x for name, x in grads._asdict().items() if x is not None},
        ddt=None if inputs.dt is None else _tokens(params, 1)[0],
        dynamics_parts=params.mean_0.new_empty(2, params.segments, *params.a_bar.shape),
    )
    if grid.split(params.R):
        params = params._replace(
            summaries=_lanes(params, len(AdjointMap._fields)), borders=_lanes(params, 2)
        )
        _each_round(unit, "kla_summarise_back" + _variance(dy_var), grid, params)
        _each(unit, "kla_link_back", params, params.R * params.G)
    if grid.slots < params.G * params.places:
        params = params._replace(channel_sums=_tokens(params, 2 + unit.gaps))
    _walk_back(unit, grid, params)
    _each(unit, "kla_sum_dynamics", params, params.G)
    return _grads(inputs, grads, params.ddt)


def _grads(inputs: ScanInputs, grads: ScanGrads, ddt: Tensor | None) -> ScanGrads:
    """The results of the kernels, in the dtypes of the inputs."""
    if inputs.dt is not None and ddt is not None:
        # The kernels differentiate with respect to -log a_bar.
        grads = grads._replace(a_bar=-grads.a_bar / inputs.a_bar)
        ddt = ddt if inputs.dt.shape[-1] == ddt.shape[-1] else ddt.sum(-1, keepdim=True)
        ddt = ddt.to(inputs.dt.dtype)
    found = (g.to(x.dtype) for g, x in zip(grads[:8], inputs[:8], strict=True))
    return ScanGrads._make((*found, ddt))


def step(inputs: ScanInputs, *, return_variance: bool) -> ScanResult:
    """Filter one token per row: ``forward`` for inputs without the T axis.

    Args:
        inputs: q, k ``[B, N]``, v, lam_v ``[B, D]``, mask ``[B]``.
        return_variance: also compute y_var.

    Returns:
        y and y_var ``[B, D]``, the new belief, no checkpoints.
    """
    q, k, v, lam_v = (x.unsqueeze(1) for x in inputs[:4])
    mask, dt = (None if x is None else x.unsqueeze(1) for x in (inputs.mask, inputs.dt))
    tokens = inputs._replace(q=q, k=k, v=v, lam_v=lam_v, mask=mask, dt=dt)
    params, blocks = prepare(tokens, STEP, inputs.compute_dtype), -(-v.shape[-1] // STEP.channels)
    params = _with_outputs(params, inputs.v, return_variance)._replace(blocks=blocks)
    unit = program("fwd", inputs.compute_dtype, STEP.group, gaps=dt is not None)
    kernel = "kla_step" + "_variance" * return_variance
    launch(unit, kernel, params.R * blocks, STEP.threads, params)
    return _result(inputs, params)


def _walk_back(unit: Program, grid: Grid, params: Params) -> None:
    """The exact backward pass, for a range of slots and of channel blocks at a time."""
    tokens, size = params.B * params.T, params.mean_0.element_size()
    wave = max(1, PART_BYTES // max(1, tokens * 2 * grid.slots * size))
    wave = min(wave, grid.blocks)
    params = params._replace(
        slot_parts=params.mean_0.new_empty(wave, tokens, 2, grid.slots),
        slot_sums=params.mean_0.new_empty(2, tokens, params.N) if wave < grid.blocks else None,
    )
    sums = -(-tokens * 2 * grid.slots // SUM_THREADS)
    for n0 in range(0, params.G * params.places, grid.slots):
        for block0 in range(0, grid.blocks, wave):
            blocks = min(wave, grid.blocks - block0)
            part = params._replace(n0=n0, block0=block0, blocks=blocks)
            kernel = "kla_backward" + _variance(params.dy_var)
            launch(unit, kernel, grid.segments * blocks, grid.threads, part)
            launch(unit, "kla_sum_slots", sums, SUM_THREADS, part)


def _each_round(unit: Program, kernel: str, grid: Grid, params: Params) -> None:
    """Launch a kernel over all segments and channels, ``grid.slots`` slots at a time."""
    for n0 in range(0, params.G * params.places, grid.slots):
        part = params._replace(n0=n0)
        launch(unit, kernel, grid.segments * grid.blocks, grid.threads, part)


def _each(unit: Program, kernel: str, params: Params, rows: int) -> None:
    """Launch a kernel with one thread per entry of an array of shape ``[rows, D]``."""
    launch(unit, kernel, -(-rows * params.D // LINK_THREADS), LINK_THREADS, params)


def _program(source: str, dtype: torch.dtype, grid: Grid, inputs: ScanInputs) -> Program:
    return program(source, dtype, grid.group, shared=inputs.slots > 1, gaps=inputs.dt is not None)


def _require_small_blocks(inputs: ScanInputs) -> None:
    if inputs.slots > LARGEST_BLOCK:
        raise ValueError(
            f"engine 'cuda' supports up to {LARGEST_BLOCK} slots that share a precision, as many "
            f"as a block of threads can add up; got {inputs.slots}. Use engine='triton' or "
            "'associative', or more blocks."
        )


def _variance(dy_var: Tensor | None) -> str:
    return "" if dy_var is None else "_variance"


def _lanes(params: Params, fields: int) -> Tensor:
    return params.mean_0.new_empty(fields, params.segments, params.N, params.D)


def _tokens(params: Params, fields: int) -> Tensor:
    return params.mean_0.new_empty(fields, params.B, params.T, params.D)


def _with_outputs(params: Params, v: Tensor, return_variance: bool) -> Params:
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    return params._replace(
        y=y,
        y_var=torch.empty_like(y) if return_variance else None,
        mean=torch.empty_like(params.mean_0),
        variance=torch.empty_like(params.variance_0),
    )


def _result(inputs: ScanInputs, params: Params) -> ScanResult:
    assert params.y is not None
    assert params.mean is not None
    assert params.variance is not None
    dtype = inputs.compute_dtype
    saved = None if params.checkpoints is None else params.checkpoints.to(dtype)
    last = params.mean.to(dtype), params.variance.to(dtype)
    return ScanResult(params.y, params.y_var, *last, saved)
