"""The dynamics as the native kernel takes them when time passes between tokens.

A gap decays the belief by a = e^(l dt) and adds the noise s_inf (1 - a^2), with the rate
l = log a_bar and the variance s_inf = p_bar / (1 - a_bar^2) that the prior relaxes to. The kernel
evaluates both where they are used, and its sums over tokens are turned into gradients here.
"""

import torch
from torch import Tensor

from kalman_attention._typing import Dynamics
from kalman_attention.filtering.ou import mean_exponential, mean_exponential_slope
from kalman_attention.ops.contract import ScanInputs

FAST_RATE = -0.375
"""KLA_FAST_RATE of ``csrc/kla_scan.h``."""

# In place of a rate of 0: so small that nothing decays and that the noise comes out as p_bar dt, so
# large that the square of what is lost over a gap has not left the range of the dtype.
_SLOWEST = {torch.float32: 1e-15, torch.float64: 1e-30}
_FASTEST = (
    1e30  # in place of the infinite rate of a_bar = 0, for which a gap of 0 would be no number
)


def with_rates(call: ScanInputs) -> ScanInputs:
    """The same call with l and s_inf for a_bar and p_bar if it has gaps, else the call itself."""
    if call.dt is None:
        return call
    rate, limit = rates(call.a_bar, call.p_bar)
    return call._replace(a_bar=rate, p_bar=limit)


def rates(a_bar: Dynamics, p_bar: Dynamics) -> tuple[Dynamics, Dynamics]:
    """Rate l and limit s_inf, ``[G, D]``, in the dtype of the arithmetic."""
    slowest = _SLOWEST[a_bar.dtype]
    rate = a_bar.log().clamp(-_FASTEST, -slowest)
    return rate, p_bar / _lost(a_bar, slowest)


def of_dynamics(
    a_bar: Dynamics, p_bar: Dynamics, rate: Dynamics, rate_sum: Tensor, lost_sum: Tensor
) -> tuple[Dynamics, Dynamics]:
    r"""Gradients of a_bar and p_bar from the sums that the kernel returns.

    With x = -2 l, M(x) = (1 - e^{-x}) / x and E(x) = 1 - e^{-x}, the noise of a gap is

    .. math:: p_t = \bar p\,dt\,\frac{M(x\,dt)}{M(x)} = \bar p\,\frac{E(x\,dt)}{E(x)},

    and its derivative with respect to l has a part that depends on the gap, which the kernel sums,
    and one that does not. The first form is for slow rates, where E vanishes; the second for fast
    ones, where the parts of the first would cancel.

    Args:
        a_bar: decay over one unit of time.
        p_bar: process-noise variance over one unit.
        rate: l as the kernel got it.
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
    """1 - a_bar^2 without a difference of close numbers; for a_bar = 1 that of the slowest rate."""
    return torch.where(a_bar < 1.0, (1.0 - a_bar) * (1.0 + a_bar), 2.0 * slowest)
