"""Arithmetic of a tile of lanes, as ``csrc/lane.h`` has it in C++.

Functions of values alone; every kernel of the engine is built on them. Names follow
``filtering/moment.py``, ``filtering/segment.py`` and ``ops/torch/reverse.py``.

A tile has M slots of G blocks in D channels. What the slots of a block share is ``[1, G, D]``, what
each has ``[M, G, D]``: slots come first, so that a thread owns all slots of a block where it can
and adds them up by itself. Where every slot is a block of its own M is 1.
"""

import triton
import triton.language as tl


@triton.jit
def reciprocal(x):
    """1 / x, rounded to nearest: ``/`` alone would be an approximation in float32."""
    if x.dtype == tl.float64:
        return 1.0 / x
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def per_block(x):
    """Sum over the slots of every block; the axis stays."""
    if x.shape[0] == 1:
        return x
    else:
        return tl.sum(x, axis=0, keep_dims=True)


@triton.jit
def over_slots(x):
    """Sum over all slots, ``[D]``: those of a block first."""
    return tl.sum(tl.sum(x, axis=0), axis=0)


@triton.jit
def seen(v, lam_v):
    """The value as the filter reads it: 0 where it is no number and there is no evidence."""
    number = tl.abs(v) < float("inf")
    return tl.where((lam_v == 0.0) & ~number, 0.0, v)


@triton.jit
def filter_step(a, p, phi, b, s, mu):
    """One token in moment form: the new variance and mean, and the retention r."""
    # a (a s), never a^2 s: the rounding of a stored a^2 would be the same in every step.
    P = a * (a * s) + p
    r = reciprocal(1.0 + phi * P)
    return P * r, r * (a * mu + P * b), r


@triton.jit
def remainder(k, k2, v, m, r):
    """What the new mean leaves of a value, k v - |k|^2 mu', without their difference.

    m is the predicted mean. A slot that is a block of its own gets it times k, with one rounding
    less.
    """
    if k.shape[0] == 1:
        return k[:, :, None] * (r * (v[None, None, :] - k[:, :, None] * m))
    else:
        return r * (k[:, :, None] * v[None, None, :] - k2[:, :, None] * m)


@triton.jit
def filter_adjoint(a, k2, lam_v, s, mu, s_new, mu_new, r, rest, dmu, ds):
    """Adjoint of ``filter_step``: dmu and ds before the token, then da, dp, db, dphi, dlam_v.

    s and mu are the belief before the token, s_new and mu_new the one after it and ``rest`` the
    remainder of its value; dmu and ds are the adjoints of the belief after it. dlam_v is
    k2 dphi + v sum k db, written so that the two do not cancel under strong evidence.
    """
    g = r * dmu
    s_ds = s_new * ds
    rest_dmu = per_block(rest * dmu)
    dP = r * (r * ds + lam_v[None, None, :] * rest_dmu)
    a_dP = a * dP
    da = per_block(mu * g) + s * (a_dP + a_dP)
    dphi = -(s_new * (per_block(mu_new * dmu) + s_ds))
    dlam_v = s_new * (rest_dmu - k2[:, :, None] * s_ds)
    return a * g, a * a_dP, da, dP, s_new * dmu, dphi, dlam_v


@triton.jit
def filter_then(a, p, phi, b, s, mu, gain, J, eta):
    """``FilterMap.then``: a segment, s to eta, followed by one token."""
    s_new, mu_new, r = filter_step(a, p, phi, b, s, mu)
    before = a * gain
    gain = r * before
    e = b - phi * (a * mu)
    return s_new, mu_new, gain, J + phi * before * gain, eta + gain * e


@triton.jit
def adjoint_then(a, r, e, dmu, ds, gain, cross, dmu_0, ds_0):
    """``AdjointMap.then``: the adjoint of a segment, gain to ds_0, followed by one token.

    dmu and ds are what the outputs of the token add.
    """
    c = a * r
    gain = c * gain
    cross = c * cross + gain * (gain * e)
    return gain, cross, dmu_0 + gain * dmu, ds_0 + per_block(cross * dmu) + gain * (gain * ds)
