"""One token per row: the decode step."""

import torch
import triton.language as tl

from kalman_attention.ops.contract import ScanInputs, ScanResult
from kalman_attention.ops.triton.lane import filter_step, seen
from kalman_attention.ops.triton.launch import OPTIONS, on_device
from kalman_attention.ops.triton.place import kernel, lanes_of, locate, token_evidence
from kalman_attention.ops.triton.schedule import FORWARD_LANES, cut, lanes_for


@kernel
def step_kernel(
    q, k, v, lam_v, mask, q_sb, k_sb, v_sb, lam_v_sb, mask_sb,
    a_bar, p_bar, mean_0, variance_0, y, y_var, mean, variance, N, D, blocks,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Filter one token of one row."""
    row, _, block = locate(0, 1, blocks)
    n, d, at, has_n, has_d = lanes_of(block, N, D, BLOCK_N, BLOCK_D)
    has = has_n[:, None] & has_d[None, :]
    DTYPE: tl.constexpr = a_bar.dtype.element_ty
    here = row * N * D + at
    s = tl.load(variance_0 + here, mask=has, other=0.0)
    mu = tl.load(mean_0 + here, mask=has, other=0.0)
    real = row >= 0 if mask is None else tl.load(mask + row * mask_sb) != 0
    keep_n, keep_d = n < tl.where(real, N, 0), d < tl.where(real, D, 0)
    q_t = tl.load(q + row * q_sb + n, mask=keep_n, other=0.0).to(DTYPE)
    k_t = tl.load(k + row * k_sb + n, mask=keep_n, other=0.0).to(DTYPE)
    v_t = tl.load(v + row * v_sb + d, mask=keep_d, other=0.0).to(DTYPE)
    lam_v_t = tl.load(lam_v + row * lam_v_sb + d, mask=keep_d, other=0.0).to(DTYPE)
    a = tl.load(a_bar + at, mask=has, other=0.0)
    p = tl.load(p_bar + at, mask=has, other=0.0)
    phi, b = token_evidence(k_t, seen(v_t, lam_v_t), lam_v_t)
    s_new, mu_new, _r = filter_step(a, p, phi, b, s, mu)
    s, mu = tl.where(real, s_new, s), tl.where(real, mu_new, mu)
    tl.store(mean + here, mu, mask=has)
    tl.store(variance + here, s, mask=has)
    tl.store(y + row * D + d, tl.sum(q_t[:, None] * mu, axis=0), mask=has_d)
    if y_var is not None:
        out = tl.sum((q_t * q_t)[:, None] * s, axis=0)
        tl.store(y_var + row * D + d, out, mask=has_d)


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
    mask = None if mask is None else mask.view(torch.uint8)
    R, N, D = mean_0.shape
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    y_var = torch.empty_like(y) if return_variance else None
    mean, variance = torch.empty_like(mean_0), torch.empty_like(mean_0)
    tile = cut(R, 1, N, D, lanes_for(dtype, FORWARD_LANES))
    strides = (*(x.stride(0) for x in (q, k, v, lam_v)), 0 if mask is None else mask.stride(0))
    step_kernel[(R * tile.blocks,)](
        q, k, v, lam_v, mask, *strides, a_bar, p_bar, mean_0, variance_0, y, y_var, mean, variance,
        N, D, tile.blocks, tile.block_n, tile.block_d, **OPTIONS,
    )  # fmt: skip
    return ScanResult(y, y_var, mean, variance, None)
