"""Arithmetic of a tile of lanes (slots n by channels d), as ``csrc/lane.h`` has it in C++.

Functions of values alone; every kernel of the engine is built on them. Names follow
``filtering/moment.py``, ``filtering/projective.py`` and ``ops/torch/reverse.py``.
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
def seen(value, precision):
    """The value as the filter reads it: 0 where it is no number and there is no evidence."""
    number = tl.abs(value) < float("inf")
    return tl.where((precision == 0.0) & ~number, 0.0, value)


@triton.jit
def filter_step(a, p, phi, b, s, mu):
    """One token in moment form: the new variance and mean, and the retention r."""
    # a (a s), never a^2 s: the rounding of a stored a^2 would be the same in every step.
    P = a * (a * s) + p
    r = reciprocal(1.0 + phi * P)
    return P * r, r * (a * mu + P * b), r


@triton.jit
def remainder(key, value, a, mu, r):
    """What the new mean leaves of a value, v - k mu', without their difference."""
    return r * (value[None, :] - key[:, None] * (a * mu))


@triton.jit
def filter_adjoint(a, key, precision, s, mu, s_new, mu_new, r, rest, dmu, ds):
    """Adjoint of ``filter_step``: dmu and ds before the token, then da, dp, db, dphi, dlam_v.

    s and mu are the belief before the token, s_new and mu_new the one after it and ``rest`` the
    remainder of its value; dmu and ds are the adjoints of the belief after it. dlam_v is
    k (k dphi + v db), written so that the two do not cancel under strong evidence.
    """
    g = r * dmu
    s_ds = s_new * ds
    k_rest = key[:, None] * (rest * dmu)
    dP = r * (r * ds + precision[None, :] * k_rest)
    a_dP = a * dP
    da = mu * g + s * (a_dP + a_dP)
    dphi = -(s_new * (mu_new * dmu + s_ds))
    dlam_v = s_new * (k_rest - (key * key)[:, None] * s_ds)
    return a * g, a * a_dP, da, dP, s_new * dmu, dphi, dlam_v


@triton.jit
def pull_back(a, key, precision, r, rest, dmu, ds):
    """Dmu and ds of ``filter_adjoint`` alone, for a walk that collects no gradients."""
    dP = r * (r * ds + precision[None, :] * (key[:, None] * (rest * dmu)))
    return a * (r * dmu), a * (a * dP)


@triton.jit
def project(a, p, phi, b, xx, xw, wx, ww, ux, uw, uu):
    """``Projective.then``: a map of (x, w, u) followed by one token, normalised to ww = 1."""
    nxx = a * (a * xx) + p * wx
    nxw = a * (a * xw) + p * ww
    scale = reciprocal(ww + phi * nxw)
    return (
        nxx * scale,
        nxw * scale,
        (wx + phi * nxx) * scale,
        (ww + phi * nxw) * scale,
        (a * ux + b * nxx) * scale,
        (a * uw + b * nxw) * scale,
        a * uu * scale,
    )
