"""One token per row: the decode step."""

import torch
import triton.language as tl

from kalman_attention.ops.contract import ScanInputs, ScanResult
from kalman_attention.ops.triton.lane import filter_step, over_slots, seen
from kalman_attention.ops.triton.launch import OPTIONS, decay_of, on_device, width_of
from kalman_attention.ops.triton.place import (
    blocks_exist,
    dynamics_of,
    kernel,
    lanes_exist,
    lanes_of,
    locate,
    squares,
    step_to,
    token_evidence,
)
from kalman_attention.ops.triton.schedule import FORWARD_LANES, cut, lanes_for


@kernel
def step_kernel(
    q, k, v, lam_v, dt, mask, q_sb, k_sb, v_sb, lam_v_sb, dt_sb, dt_sd, mask_sb,
    a_bar, p_bar, mean_0, variance_0, y, y_var, mean, variance, N, G, D, blocks,
    BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Filter one token of one row."""
    row, _, block = locate(0, 1, blocks)
    G = N if BLOCK_M == 1 else G  # one value, so that its offsets are computed once
    n, d, at, at_g, _first = lanes_of(block, N, G, D, BLOCK_M, BLOCK_G, BLOCK_D)
    _, has_d, has = lanes_exist(n, d, N, D)
    has_g = blocks_exist(has)
    DTYPE: tl.constexpr = a_bar.dtype.element_ty
    here, here_g = row * N * D + at, row * G * D + at_g
    s = tl.load(variance_0 + here_g, mask=has_g, other=0.0)
    mu = tl.load(mean_0 + here, mask=has, other=0.0)
    real = row >= 0 if mask is None else tl.load(mask + row * mask_sb) != 0
    keep_n, keep_d = n < tl.where(real, N, 0), d < tl.where(real, D, 0)
    q_t = tl.load(q + row * q_sb + n, mask=keep_n, other=0.0).to(DTYPE)
    k_t = tl.load(k + row * k_sb + n, mask=keep_n, other=0.0).to(DTYPE)
    v_t = tl.load(v + row * v_sb + d, mask=keep_d, other=0.0).to(DTYPE)
    lam_v_t = tl.load(lam_v + row * lam_v_sb + d, mask=keep_d, other=0.0).to(DTYPE)
    GAPS: tl.constexpr = dt is not None
    a, p, half, _unit = dynamics_of(a_bar, p_bar, at_g, has_g, GAPS)
    a, p = step_to(a, p, half, dt, dt_sb, 0, dt_sd, row, 0, d, keep_d)
    phi, b = token_evidence(k_t, seen(v_t, lam_v_t), lam_v_t)
    s_new, mu_new, _r = filter_step(a, p, phi, b, s, mu, GAPS)
    s, mu = tl.where(real, s_new, s), tl.where(real, mu_new, mu)
    tl.store(mean + here, mu, mask=has)
    tl.store(variance + here_g, s, mask=has_g)
    tl.store(y + row * D + d, over_slots(q_t[:, :, None] * mu), mask=has_d)
    if y_var is not None:
        tl.store(y_var + row * D + d, over_slots(squares(q_t)[:, :, None] * s), mask=has_d)


@on_device
def step(inputs: ScanInputs, *, return_variance: bool) -> ScanResult:
    """Filter one token per row: ``forward`` for inputs without the T axis.

    Args:
        inputs: q, k ``[B, N]``, v, lam_v ``[B, D]``, mask ``[B]``.
        return_variance: also compute y_var.

    Returns:
        y and y_var ``[B, D]``, the new belief, no checkpoints.
    """
    dtype = inputs.compute_dtype
    q, k, v, lam_v, a_bar, p_bar, mean_0, variance_0, mask, *_ = inputs.dense(dtype)
    a_bar, dt = decay_of(inputs, a_bar), inputs.dt
    mask = None if mask is None else mask.view(torch.uint8)
    (R, N, D), G = mean_0.shape, len(a_bar)
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    y_var = torch.empty_like(y) if return_variance else None
    mean, variance = torch.empty_like(mean_0), torch.empty_like(variance_0)
    plan = cut(R, 1, N, D, lanes_for(dtype, FORWARD_LANES), N // G)
    strides = [x.stride(0) for x in (q, k, v, lam_v)]
    strides += (0, 0) if dt is None else (dt.stride(0), width_of(dt))
    strides.append(0 if mask is None else mask.stride(0))
    step_kernel[(R * plan.blocks,)](
        q, k, v, lam_v, dt, mask, *strides,
        a_bar, p_bar, mean_0, variance_0, y, y_var, mean, variance,
        N, G, D, plan.blocks, *plan.tile, **OPTIONS,
    )  # fmt: skip
    return ScanResult(y, y_var, mean, variance, None)
