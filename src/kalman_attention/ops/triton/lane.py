"""Arithmetic of a tile of lanes (slots n by channels d), as ``csrc/lane.h`` has it in C++.

Functions of values alone; every kernel of the engine is built on them. Names follow
``filtering/moment.py``, ``filtering/segment.py`` and ``ops/torch/reverse.py``.
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
def remainder(k, v, a, mu, r):
    """What the new mean leaves of a value, v - k mu', without their difference."""
    return r * (v[None, :] - k[:, None] * (a * mu))


@triton.jit
def filter_adjoint(a, k, lam_v, s, mu, s_new, mu_new, r, rest, dmu, ds):
    """Adjoint of ``filter_step``: dmu and ds before the token, then da, dp, db, dphi, dlam_v.

    s and mu are the belief before the token, s_new and mu_new the one after it and ``rest`` the
    remainder of its value; dmu and ds are the adjoints of the belief after it. dlam_v is
    k (k dphi + v db), written so that the two do not cancel under strong evidence.
    """
    g = r * dmu
    s_ds = s_new * ds
    k_rest = k[:, None] * (rest * dmu)
    dP = r * (r * ds + lam_v[None, :] * k_rest)
    a_dP = a * dP
    da = mu * g + s * (a_dP + a_dP)
    dphi = -(s_new * (mu_new * dmu + s_ds))
    dlam_v = s_new * (k_rest - (k * k)[:, None] * s_ds)
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
    return gain, cross, dmu_0 + gain * dmu, ds_0 + cross * dmu + gain * (gain * ds)
