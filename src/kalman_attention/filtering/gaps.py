r"""Time between tokens: the dynamics of one unit of time, extended to any gap.

The prior is an Ornstein-Uhlenbeck process (``ou``), so its transition over a gap dt is exact for
every dt. With a_bar and p_bar the dynamics of one unit of time and l = log a_bar,

.. math:: a_t = e^{l\,dt}, \qquad
          p_t = \bar p\,\frac{e^{2 l\,dt} - 1}{e^{2 l} - 1} \quad
          (\bar p\,dt \text{ as } \bar a \to 1).

Gaps add up: predicting over dt_1 and then over dt_2 equals predicting over dt_1 + dt_2. A gap of 0
is no predict step at all, a gap of 1 is the ordinary one. Over long gaps the belief relaxes to the
stationary distribution of the prior.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kalman_attention._typing import Belief, Dynamics
from kalman_attention.filtering.ou import mean_exponential, mean_exponential_slope

# The two forms of dg/dx below cancel in opposite regimes, one for fast rates and one for slow ones.
# The switch is where about half of a variance decays in one unit of time: exp(-0.75) = 0.47.
FAST = 0.75
"""Rates with -2 log a_bar above this count as fast."""


class Transition(NamedTuple):
    """Dynamics over the gap before a token: decay a and noise variance p, ``[..., N, D]``."""

    a: Tensor
    p: Tensor


def transition(a_bar: Dynamics, p_bar: Dynamics, dt: Tensor) -> Transition:
    """Decay and process-noise variance over a gap.

    Args:
        a_bar: decay over one unit of time, in (0, 1], ``[N, D]``.
        p_bar: process-noise variance over one unit, ``[N, D]``.
        dt: length of the gap in units, at least 0, ``[..., D]`` or ``[..., 1]``.
    """
    gap, x = dt.unsqueeze(-2), -2.0 * a_bar.log()
    share = gap * mean_exponential(x * gap) / mean_exponential(x)
    return Transition(a=torch.exp(-0.5 * x * gap), p=p_bar * share)


def transition_adjoint(
    a_bar: Dynamics, p_bar: Dynamics, dt: Tensor, da: Belief, dp: Belief
) -> tuple[Belief, Belief, Tensor]:
    r"""Gradients with respect to a_bar, p_bar and dt: the adjoint of ``transition``.

    With x = -2 l, M(x) = (1 - e^{-x}) / x and g = dt M(x dt) / M(x), p_t is p_bar g and

    .. math:: \frac{\partial g}{\partial dt} = \frac{e^{-x\,dt}}{M(x)}, \qquad
              \frac{\partial g}{\partial x} =
              dt\,\frac{dt\,M'(x\,dt) M(x) - M(x\,dt) M'(x)}{M(x)^2}
              = dt\,\frac{e^{-x\,dt} M(x) - M(x\,dt)\,e^{-x}}{x\,M(x)^2}.

    The first form is used for slow rates, where x vanishes; the second for fast ones, where the two
    slopes of M are nearly equal and cancel.

    Args:
        a_bar: as for ``transition``.
        p_bar: as for ``transition``.
        dt: as for ``transition``.
        da: gradient with respect to the decay of every token, ``[..., N, D]``.
        dp: gradient with respect to its noise variance, ``[..., N, D]``.

    Returns:
        The contribution of every token to the gradients of a_bar and of p_bar, ``[..., N, D]``, and
        the gradient with respect to dt, in the shape of dt.
    """
    gap, x = dt.unsqueeze(-2), -2.0 * a_bar.log()
    unit, whole = mean_exponential(x), mean_exponential(x * gap)
    a_da = torch.exp(-0.5 * x * gap) * da
    left = torch.exp(-x * gap)
    # Both forms are evaluated; the clamp keeps the unused one finite, so that where() is safe.
    slow = gap * mean_exponential_slope(x * gap) * unit - whole * mean_exponential_slope(x)
    fast = (left * unit - whole * torch.exp(-x)) / x.clamp(min=FAST)
    slope = torch.where(x > FAST, fast, slow)
    dx = -0.5 * gap * a_da + p_bar * (gap * slope / (unit * unit)) * dp
    ddt = (-0.5 * x * a_da + p_bar * (left / unit) * dp).sum(-2)
    ddt = ddt.sum(-1, keepdim=True) if dt.shape[-1] == 1 else ddt  # one gap for all channels
    return -2.0 * dx / a_bar, gap * whole / unit * dp, ddt
