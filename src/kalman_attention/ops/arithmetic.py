"""Dtype of the arithmetic: float64 for calls in which float32 cannot keep the accuracy."""

import torch
from torch import Tensor

from kalman_attention.ops.contract import ScanInputs

LONG_MEMORY = 4096
"""Beyond this memory, in tokens, float32 arithmetic no longer keeps the accuracy contract."""

WEAK_MEMORY = 1024
"""The same where evidence is so weak that noise does not end the memory by then."""

UNSEEN_MEMORY = 128
"""The same for a call in which no token brings evidence."""

FAR_OFF = 1024.0
"""Incoming means, as keys see them, that exceed all values by more than this dwarf them."""


def needed_dtype(inputs: ScanInputs, *, gradients: bool) -> torch.dtype | None:
    """Dtype of the arithmetic that keeps the accuracy contract, found from values; CPU only.

    Args:
        inputs: a call.
        gradients: whether the gradient of lam_v may be asked for.

    Returns:
        float64 where float32 would lose track, else the compute dtype; None where values cannot be
        looked at. On a device nothing is: a look would stall it at every call.
    """
    short = inputs.compute_dtype
    if inputs.v.device.type != "cpu" or short == torch.float64:
        return short
    try:
        lost = _loses_track(inputs) or (gradients and _starts_far_off(inputs))
    except RuntimeError:  # inside vmap a tensor has no value; the op asks again where it has
        return None
    return torch.float64 if lost else short


def _loses_track(inputs: ScanInputs) -> bool:
    """Whether what float32 drops in every step adds up.

    A change smaller than half a unit in the last place is lost in every step. Where neither decay
    nor process noise ends the memory of a slot, the losses add up: after 65,536 tokens the variance
    would be off by a part in a thousand. Short gaps make for small changes. Noise ends a memory
    together with evidence, after 1 / sqrt(phi p) tokens. Without any evidence rounding has the same
    sign in every step; over gaps the belief then relaxes to the prior, and what it still depends on
    is a small difference.
    """
    T, dt = inputs.v.shape[1], inputs.dt
    if T <= UNSEEN_MEMORY and dt is None:
        return False
    # Some tokens tell at once in almost every call.
    if not (bool(inputs.lam_v[:, ::64].any()) or bool(inputs.lam_v.any())):
        return True
    if T <= UNSEEN_MEMORY or (dt is None and T <= WEAK_MEMORY):
        return False
    a_bar, p_bar = inputs.a_bar.detach().abs(), inputs.p_bar.detach()
    gap = _mean_gap(inputs)
    if not bool(-gap * a_bar.max().log() < 1.0 / WEAK_MEMORY):  # as in almost every call
        return False
    decay, noise = -gap * a_bar.log(), gap * p_bar
    slow, slowest = decay < 1.0 / WEAK_MEMORY, decay < 1.0 / LONG_MEMORY
    lost = slowest & (noise < 1e-5) if T > LONG_MEMORY else torch.zeros_like(slow)
    if dt is not None:
        lost = lost | ((decay + noise > 0) & (decay < 2.0**-22) & (noise < 2.0**-22))
    if T > WEAK_MEMORY:
        k, lam_v = (x.detach()[:, ::64].double() for x in (inputs.k, inputs.lam_v))
        phi = inputs.slots * (k * k).nanmean() * lam_v.nanmean()
        # Little noise matters for the longest memories only.
        moves = (slowest & (noise > 0)) | (slow & (noise > 1e-3))
        lost = lost | (moves & (phi * noise < WEAK_MEMORY**-2))
    return bool(lost.any())


def _starts_far_off(inputs: ScanInputs) -> bool:
    """Whether the incoming means dwarf the values, so that the gradient of lam_v would lose them.

    Before evidence comes, a token is compared with a mean far from its value, and what later tokens
    take off that mean again is added: without noise what is left of both is the distance to the
    last mean, of the size of the values.
    """
    if inputs.v.shape[1] < 2 or inputs.mean_0.numel() == 0:
        return False
    mean, k, v = (x.detach() for x in (inputs.mean_0, inputs.k, inputs.v))
    furthest = _largest(mean)
    if not bool(furthest > 0):  # the usual prior
        return False
    far = furthest * _largest(k) / FAR_OFF
    if not bool(far > _largest(v[:, ::64])) or not bool(far > _largest(v)):
        return False
    noise = _mean_gap(inputs) * inputs.p_bar.detach().max()
    return bool(noise < 0.01 * inputs.variance_0.detach().max())


def _mean_gap(inputs: ScanInputs) -> Tensor:
    """Time between tokens on average, over 256 to 511 of them: all would take as long as a scan."""
    if inputs.dt is None:
        return torch.ones(())
    some = inputs.dt.detach()[:, :: max(1, inputs.dt.shape[1] // 256)]
    return some.float().nanmean()


def _largest(x: Tensor) -> Tensor:
    """Magnitude of the largest entry that is a number."""
    return x.nan_to_num(0.0, 0.0, 0.0).abs().max().double()


def require_arithmetic(acc_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
    """The arithmetic may be longer than the inputs, never shorter."""
    if acc_dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"acc_dtype is {acc_dtype} but must be torch.float32 or torch.float64: shorter types "
            "lose the belief within a few tokens. Leave it out for the usual choice."
        )
    if acc_dtype == torch.float32 and compute_dtype == torch.float64:
        raise ValueError(
            "acc_dtype is torch.float32 but the inputs are float64, whose digits it would drop. "
            "Convert the inputs to float32, or leave acc_dtype out."
        )
