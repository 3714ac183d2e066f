"""Forward, backward and single step of the Kalman scan, as the engine contract requires.

Where time passes between tokens, the kernel takes other dynamics: a gap decays the belief by
a = e^(l dt) and adds the noise s_inf (1 - a^2), with the rate l = log a_bar and the stationary
variance s_inf = p_bar / (1 - a_bar^2) of the prior. The kernel evaluates both where they are used;
its sums over tokens are converted to gradients of a_bar and p_bar here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kalman_attention._typing import Dynamics
from kalman_attention.filtering.ou import mean_exponential, mean_exponential_slope
from kalman_attention.filtering.segment import AdjointMap, FilterMap
from kalman_attention.ops.contract import (
    DTYPES,
    NO_ARRAY,
    ScanGrads,
    ScanInputs,
    ScanResult,
    at,
    dense,
)
from kalman_attention.ops.cpu.abi import (
    KALMAN,
    PARAMS,
    Outputs,
    run_adjoint_map,
    run_backward,
    run_filter_map,
    run_forward,
    run_smooth,
    run_smooth_backward,
)
from kalman_attention.ops.cpu.library import ABI_VERSION, check, load

NO_GAPS = (*NO_ARRAY, 0)

# Beyond this rate over half of a variance decays in one unit of time, and the two forms of the
# gradient in ``dynamics_grads`` change places.
FAST_RATE = -0.375
"""KLA_FAST_RATE of ``csrc/kla_scan.h``."""

# Stands for a rate of 0: small enough that nothing decays and the noise becomes p_bar dt, large
# enough that the square of what is lost over a gap stays within the range of the dtype.
_SLOWEST = {torch.float32: 1e-15, torch.float64: 1e-30}
# Stands for the infinite rate of a_bar = 0, which would give NaN for a gap of 0.
_FASTEST = 1e30


def forward(
    inputs: ScanInputs,
    *,
    return_variance: bool,
    save: bool,
    isa: str = "auto",
    pool: str = "auto",
) -> ScanResult:
    """Filter every row.

    Args:
        inputs: validated arguments on the CPU.
        return_variance: also compute y_var.
        save: save the belief before each chunk, for ``backward``.
        isa: instruction set, for tests.
        pool: thread pool, for tests.

    Returns:
        Outputs, final beliefs and checkpoints.
    """
    call = with_rates(inputs.dense(inputs.arithmetic_dtype))
    y = torch.empty(inputs.v.shape, dtype=inputs.v.dtype)
    y_var = torch.empty_like(y) if return_variance else None
    mean, variance = torch.empty_like(call.mean_0), torch.empty_like(call.variance_0)
    checkpoints = call.new_checkpoints(call.mean_0.dtype) if save else None
    if checkpoints is not None and call.slots > 1:
        # Shared variances need less memory than the contract provides; the rest is defined as 0.
        used = call.chunks * (mean[0].numel() + variance[0].numel()) if len(mean) else 0
        checkpoints.view(-1)[used:].zero_()
    run_forward(KALMAN, call, Outputs(y, y_var, mean, variance, checkpoints), isa, pool)
    dtype = inputs.compute_dtype
    saved = None if checkpoints is None else checkpoints.to(dtype)
    return ScanResult(y, y_var, mean.to(dtype), variance.to(dtype), saved)


def backward(
    inputs: ScanInputs,
    checkpoints: Tensor,
    dy: Tensor | None,
    dy_var: Tensor | None,
    dmean: Tensor | None,
    dvariance: Tensor | None,
    *,
    isa: str = "auto",
    pool: str = "auto",
) -> ScanGrads:
    """Exact gradients with respect to the floating inputs.

    Args:
        inputs: the arguments of the forward pass.
        checkpoints: the beliefs that it saved.
        dy: gradient with respect to y; None means 0.
        dy_var: gradient with respect to y_var; None means 0.
        dmean: gradient with respect to the final mean; None means 0.
        dvariance: gradient with respect to the final variance; None means 0.
        isa: instruction set, for tests.
        pool: thread pool, for tests.

    Returns:
        Gradients in the shapes and dtypes of the inputs.
    """
    given = (dy, dy_var, dmean, dvariance)

    def run(call: ScanInputs, grads: tuple[Tensor | None, ...]) -> None:
        run_backward(KALMAN, call, checkpoints, given, grads, isa, pool)

    return _grads(inputs, run)


def _grads(
    inputs: ScanInputs, run: Callable[[ScanInputs, tuple[Tensor | None, ...]], None]
) -> ScanGrads:
    """What ``run`` writes into the arrays that it is given, as gradients of the inputs."""
    call = with_rates(inputs.dense(inputs.arithmetic_dtype))
    grads = [torch.empty(x.shape, dtype=x.dtype) for x in call[:8]]
    ddt = None if call.dt is None else torch.empty(call.dt.shape, dtype=call.dt.dtype)
    run(call, (*grads, ddt))
    if inputs.dt is not None:
        grads[4:6] = dynamics_grads(inputs.a_bar, inputs.p_bar, call.a_bar, grads[4], grads[5])
    found = ScanGrads(*(g.to(x.dtype) for g, x in zip(grads, inputs[:8], strict=True)))
    return found._replace(dt=ddt)


def smooth(inputs: ScanInputs, *, isa: str = "auto", pool: str = "auto") -> ScanResult:
    """Read the belief at each token given all tokens: one pass forwards, one backwards.

    Args:
        inputs: validated arguments on the CPU.
        isa: instruction set, for tests.
        pool: thread pool, for tests.

    Returns:
        Smoothed outputs and the final beliefs of the filter, without checkpoints.
    """
    call = with_rates(inputs.dense(inputs.arithmetic_dtype))
    y, y_var = (torch.empty(inputs.v.shape, dtype=inputs.v.dtype) for _ in range(2))
    mean, variance = torch.empty_like(call.mean_0), torch.empty_like(call.variance_0)
    saved = call.new_checkpoints(call.mean_0.dtype)
    run_forward(KALMAN, call, Outputs(y, None, mean, variance, saved), isa, pool)
    run_smooth(call, Outputs(y, y_var, checkpoints=saved), isa, pool)
    dtype = inputs.compute_dtype
    return ScanResult(y, y_var, mean.to(dtype), variance.to(dtype), None)


def smooth_backward(
    inputs: ScanInputs,
    dy: Tensor | None,
    dy_var: Tensor | None,
    dmean: Tensor | None,
    dvariance: Tensor | None,
    *,
    isa: str = "auto",
    pool: str = "auto",
) -> ScanGrads:
    """Exact gradients of ``smooth`` with respect to the floating inputs.

    Arguments as for ``backward``; nothing is saved by the forward pass, and the beliefs of a row
    are kept in memory for one vector of channels per thread.
    """
    given = (dy, dy_var, dmean, dvariance)
    return _grads(inputs, lambda call, grads: run_smooth_backward(call, given, grads, isa, pool))


def filter_map(inputs: ScanInputs, *, isa: str = "auto", pool: str = "auto") -> FilterMap:
    """The map from the belief before every row to the belief after it.

    Args:
        inputs: validated arguments on the CPU; q and the belief are not read.
        isa: instruction set, for tests.
        pool: thread pool, for tests.

    Returns:
        Entries ``[R, N, D]`` (shared ones ``[R, G, D]``) in the compute dtype.
    """
    call = with_rates(inputs.dense(inputs.arithmetic_dtype))
    return FilterMap(*(x.to(inputs.compute_dtype) for x in run_filter_map(call, isa, pool)))


def adjoint_map(
    inputs: ScanInputs,
    checkpoints: Tensor,
    dy: Tensor | None,
    dy_var: Tensor | None,
    *,
    isa: str = "auto",
    pool: str = "auto",
) -> AdjointMap:
    """The map from gradients with respect to the belief after every row to those before it.

    Args:
        inputs: the arguments of the forward pass.
        checkpoints: the beliefs that it saved.
        dy: gradient with respect to y; None means 0.
        dy_var: gradient with respect to y_var; None means 0.
        isa: instruction set, for tests.
        pool: thread pool, for tests.

    Returns:
        Entries ``[R, N, D]`` (shared ones ``[R, G, D]``) in the compute dtype.
    """
    call = with_rates(inputs.dense(inputs.arithmetic_dtype))
    found = run_adjoint_map(call, checkpoints, dy, dy_var, isa, pool)
    return AdjointMap(*(x.to(inputs.compute_dtype) for x in found))


def step(inputs: ScanInputs, *, return_variance: bool) -> ScanResult:
    """Filter one token per row: ``forward`` for inputs without the T axis.

    Args:
        inputs: q, k ``[B, N]``, v, lam_v, dt ``[B, D]``, mask ``[B]``.
        return_variance: also compute y_var.

    Returns:
        y and y_var ``[B, D]``, the new belief, no checkpoints.
    """
    # Written out without helpers: the kernel takes a few microseconds, so every call would show.
    dtype = torch.float64 if inputs.v.dtype is torch.float64 else torch.float32
    q, k, v, lam_v, a_bar, p_bar, mean_0, variance_0, mask, _, _, dt = inputs
    q, k, v, lam_v = q.contiguous(), k.contiguous(), v.contiguous(), lam_v.contiguous()
    a_bar, p_bar = dense(a_bar, dtype), dense(p_bar, dtype)
    mean_0, variance_0 = dense(mean_0, dtype), dense(variance_0, dtype)
    if dt is not None:
        dt, (a_bar, p_bar) = dt.contiguous(), rates(a_bar, p_bar)
    (R, N, D), G = mean_0.shape, a_bar.shape[0]
    y, mean, variance = torch.empty_like(v), torch.empty_like(mean_0), torch.empty_like(variance_0)
    y_var = torch.empty_like(v) if return_variance else None
    gaps = NO_GAPS if dt is None else (dt.data_ptr(), dt.shape[1], 0, DTYPES[dt.dtype], dt.shape[1])
    params = PARAMS.pack(
        *(ABI_VERSION, KALMAN, DTYPES[dtype], 0, 0, torch.get_num_threads(), R, 1, N, G, D, R),
        *(v.data_ptr(), D, 0, DTYPES[v.dtype], lam_v.data_ptr(), D, 0, DTYPES[lam_v.dtype]),
        *(k.data_ptr(), N, 0, DTYPES[k.dtype], q.data_ptr(), N, 0, DTYPES[q.dtype]),
        *(NO_ARRAY if mask is None else (mask.data_ptr(), mask.stride(0), 0, 0)),
        *gaps,
        *(a_bar.data_ptr(), p_bar.data_ptr(), mean_0.data_ptr(), variance_0.data_ptr(), 0),
        *(y.data_ptr(), at(y_var), mean.data_ptr(), variance.data_ptr(), 0),
    )
    check(load().kla_scan_forward(params))
    return ScanResult(y, y_var, mean, variance, None)


def with_rates(call: ScanInputs) -> ScanInputs:
    """Replace a_bar and p_bar by l and s_inf if the call has gaps."""
    if call.dt is None:
        return call
    rate, limit = rates(call.a_bar, call.p_bar)
    return call._replace(a_bar=rate, p_bar=limit)


def rates(a_bar: Dynamics, p_bar: Dynamics) -> tuple[Dynamics, Dynamics]:
    """Rate l and limit s_inf, ``[G, D]``, in the dtype of the arithmetic."""
    slowest = _SLOWEST[a_bar.dtype]
    rate = a_bar.log().clamp(-_FASTEST, -slowest)
    return rate, p_bar / _lost(a_bar, slowest)


def dynamics_grads(
    a_bar: Dynamics, p_bar: Dynamics, rate: Dynamics, rate_sum: Tensor, lost_sum: Tensor
) -> tuple[Dynamics, Dynamics]:
    r"""Gradients with respect to a_bar and p_bar, from the sums that the kernel returns.

    With x = -2 l, M(x) = (1 - e^{-x}) / x and E(x) = 1 - e^{-x}, the noise of a gap is

    .. math:: p_t = \bar p\,dt\,\frac{M(x\,dt)}{M(x)} = \bar p\,\frac{E(x\,dt)}{E(x)},

    and its derivative with respect to l has a part that depends on the gap, which the kernel sums,
    and one that does not. The first form is used for slow rates, where E vanishes; the second for
    fast ones, where the parts of the first would cancel.

    Args:
        a_bar: decay over one unit of time.
        p_bar: process-noise variance over one unit.
        rate: l as passed to the kernel.
        rate_sum: its sum ``da_bar``; see ``csrc/kla_scan.h``.
        lost_sum: its sum ``dp_bar``.
    """
    a, p, x = a_bar.double(), p_bar.double(), -2.0 * rate.double()
    lost = _lost(a, _SLOWEST[rate.dtype])
    dp = lost_sum.double() / lost
    slow = mean_exponential_slope(x) / mean_exponential(x)
    same = torch.where(rate < FAST_RATE, a * a / lost, slow)
    of_rate = rate_sum.double() / rate.double() + 2.0 * same * p * dp
    da = of_rate / a.clamp(min=torch.finfo(a_bar.dtype).tiny)
    return da.to(a_bar.dtype), dp.to(p_bar.dtype)


def _lost(a_bar: Dynamics, slowest: float) -> Dynamics:
    """1 - a_bar^2 without cancellation; for a_bar = 1, the value of the slowest rate."""
    return torch.where(a_bar < 1.0, (1.0 - a_bar) * (1.0 + a_bar), 2.0 * slowest)
