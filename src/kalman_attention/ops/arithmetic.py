"""Dtype of the arithmetic: float64 for calls in which float32 would miss the accuracy contract.

Float32 drops any change smaller than half a unit in the last place. That is harmless as long as a
slot forgets, by decay or by process noise, before such losses add up. The thresholds below are
where measured errors reach the contract (1e-5 of the largest output; ``docs/engines.md``).
"""

import torch
from torch import Tensor

from kalman_attention.ops.contract import ScanInputs

LONG_MEMORY = 4096
"""Memories longer than this, in tokens, need float64: float32 would miss the contract."""

# Process noise ends a memory only together with evidence, after about 1 / sqrt(phi p) tokens. With
# weak evidence the noise itself is what gets lost: it is added with the same rounding every step.
WEAK_MEMORY = 1024
"""The same limit where evidence is too weak for noise to end the memory by then."""

# Without any evidence the rounding errors have the same sign in every step, so they grow fastest.
UNSEEN_MEMORY = 128
"""The same limit for a call in which no token brings evidence."""

# Ten bits of the 24 of float32: what is left still gives the gradient of lam_v to about 1e-4.
FAR_OFF = 1024.0
"""Initial means, times the keys, that exceed all values by more than this factor need float64."""


def needed_dtype(inputs: ScanInputs, *, gradients: bool) -> torch.dtype | None:
    """Dtype of the arithmetic that keeps the accuracy contract, judged by the values; CPU only.

    Args:
        inputs: a call.
        gradients: whether the gradient with respect to lam_v may be needed.

    Returns:
        float64 where float32 would miss the contract, else the compute dtype; None where values are
        not available.
    """
    # On other devices values are not inspected: it would force a synchronisation at every call.
    short = inputs.compute_dtype
    if inputs.v.device.type != "cpu" or short == torch.float64:
        return short
    try:
        lost = _loses_track(inputs) or (gradients and _starts_far_off(inputs))
    except RuntimeError:  # inside vmap a tensor has no value; the op decides again where it has
        return None
    return torch.float64 if lost else short


def _loses_track(inputs: ScanInputs) -> bool:
    """Whether the changes that float32 drops in every step add up beyond the contract.

    Where neither decay nor process noise ends the memory of a slot, they do: after 65,536 tokens
    the variance would be wrong by a part in a thousand. Over gaps it is the decay and the noise of
    an average gap that count. Without any evidence the belief relaxes to the prior, and its
    gradients depend on a small difference.
    """
    T, dt = inputs.v.shape[1], inputs.dt
    if T <= UNSEEN_MEMORY and dt is None:
        return False
    # Looking at every 64th token first decides almost every call without a pass over the data.
    if not (bool(inputs.lam_v[:, ::64].any()) or bool(inputs.lam_v.any())):
        return True
    if T <= UNSEEN_MEMORY or (dt is None and T <= WEAK_MEMORY):
        return False
    a_bar, p_bar = inputs.a_bar.detach().abs(), inputs.p_bar.detach()
    gap = _mean_gap(inputs)
    if not bool(-gap * a_bar.max().log() < 1.0 / WEAK_MEMORY):  # the usual case: no slow slot
        return False
    decay, noise = -gap * a_bar.log(), gap * p_bar
    slow, slowest = decay < 1.0 / WEAK_MEMORY, decay < 1.0 / LONG_MEMORY
    # With p_bar of 1e-5 or more, noise refreshes the variance before the losses reach the contract.
    lost = slowest & (noise < 1e-5) if T > LONG_MEMORY else torch.zeros_like(slow)
    if dt is not None:
        # Half a unit in the last place is 2^-24: a change below 2^-22 keeps two bits at most.
        lost = lost | ((decay + noise > 0) & (decay < 2.0**-22) & (noise < 2.0**-22))
    if T > WEAK_MEMORY:
        k, lam_v = (x.detach()[:, ::64].double() for x in (inputs.k, inputs.lam_v))
        phi = inputs.slots * (k * k).nanmean() * lam_v.nanmean()
        # Noise of up to 1e-3 matters only for the slowest slots, more of it for all slow ones.
        moves = (slowest & (noise > 0)) | (slow & (noise > 1e-3))
        lost = lost | (moves & (phi * noise < WEAK_MEMORY**-2))
    return bool(lost.any())


def _starts_far_off(inputs: ScanInputs) -> bool:
    """Whether the initial means dwarf the values, which would ruin the gradient of lam_v.

    Before evidence arrives, a token is compared with a mean far from its value, and the correction
    by later tokens is added. Without noise the two nearly cancel: what remains is the distance to
    the final mean, which is of the size of the values.
    """
    if inputs.v.shape[1] < 2 or inputs.mean_0.numel() == 0:
        return False
    mean, k, v = (x.detach() for x in (inputs.mean_0, inputs.k, inputs.v))
    furthest = _largest(mean)
    if not bool(furthest > 0):  # the usual prior has mean 0
        return False
    far = furthest * _largest(k) / FAR_OFF
    if not bool(far > _largest(v[:, ::64])) or not bool(far > _largest(v)):
        return False
    # Noise of a hundredth of the variance forgets the initial mean soon enough.
    noise = _mean_gap(inputs) * inputs.p_bar.detach().max()
    return bool(noise < 0.01 * inputs.variance_0.detach().max())


def _mean_gap(inputs: ScanInputs) -> Tensor:
    """Average time between tokens."""
    # Over a sample of 256 to 511 tokens, and of two or three rows if every channel has its own gap:
    # reading all of them would take as long as the scan.
    if inputs.dt is None:
        return torch.ones(())
    some = inputs.dt.detach()[:, :: max(1, inputs.dt.shape[1] // 256)]
    if some.dim() == 3:
        some = some[:: max(1, some.shape[0] // 2)]
    return some.float().nanmean()


def _largest(x: Tensor) -> Tensor:
    """Magnitude of the largest finite entry."""
    return x.nan_to_num(0.0, 0.0, 0.0).abs().max().double()


def require_arithmetic(acc_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
    """Check that the arithmetic is not less precise than the inputs."""
    if acc_dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"acc_dtype is {acc_dtype} but must be torch.float32 or torch.float64: shorter types "
            "lose the state within a few tokens. Omit it for the default."
        )
    if acc_dtype == torch.float32 and compute_dtype == torch.float64:
        raise ValueError(
            "acc_dtype is torch.float32 but the inputs are float64, whose digits it would drop. "
            "Convert the inputs to float32, or omit acc_dtype."
        )
