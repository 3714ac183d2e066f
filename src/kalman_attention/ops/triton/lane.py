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
def filter_step(a, p, phi, b, s, mu):
    """One token in moment form: the new variance and mean, and the retention r."""
    # a (a s), never a^2 s: the rounding of a stored a^2 would be the same in every step.
    P = a * (a * s) + p
    r = reciprocal(1.0 + phi * P)
    return P * r, r * (a * mu + P * b), r


@triton.jit
def filter_adjoint(a, phi, b, s, mu, s_new, r, dmu, ds):
    """Adjoint of ``filter_step``: dmu and ds before the token, then da, dp, db, dphi.

    s and mu are the belief before the token, s_new the variance after it; dmu and ds are the
    adjoints of the belief after it.
    """
    g = r * dmu
    gm = g * (a * mu)
    dS = ds + b * dmu
    dP = r * (r * dS - phi * gm)
    a_dP = a * dP
    da = mu * g + s * (a_dP + a_dP)
    return a * g, a * a_dP, da, dP, s_new * dmu, -(s_new * (s_new * dS + gm))


@triton.jit
def pull_back(a, phi, b, mu, r, dmu, ds):
    """Dmu and ds of ``filter_adjoint`` alone, for a walk that collects no gradients."""
    g = r * dmu
    dP = r * (r * (ds + b * dmu) - phi * (g * (a * mu)))
    return a * g, a * (a * dP)


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
