"""Arithmetic of a tile of lanes; the counterpart in C++ is ``csrc/lane.h``.

Pure functions of values, on which every kernel of the engine is built. Names follow
``filtering/moment.py``, ``filtering/segment.py`` and ``ops/torch/reverse.py``.

A tile has M slots of G blocks in D channels. Quantities that the slots of a block share are ``[1,
G, D]``, those of each slot ``[M, G, D]``. Slots come first, so that a thread owns all slots of a
block where possible and sums over them without communication. With one slot per block M is 1.

The decay over a gap in time is represented by what it takes away, u = 1 - a; the constant ``GAPS``
says which of the two an argument ``a`` is.
"""

import triton
import triton.language as tl


@triton.jit
def reciprocal(x):
    """1 / x, rounded to nearest; in float32 the operator ``/`` is only an approximation."""
    if x.dtype == tl.float64:
        return 1.0 / x
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def per_block(x):
    """Sum over the slots of every block, keeping the axis."""
    if x.shape[0] == 1:
        return x
    else:
        return tl.sum(x, axis=0, keep_dims=True)


@triton.jit
def over_slots(x):
    """Sum over all slots, ``[D]``, within blocks first."""
    return tl.sum(tl.sum(x, axis=0), axis=0)


@triton.jit
def seen(v, lam_v):
    """The value, or 0 where it is not finite and there is no evidence."""
    number = tl.abs(v) < float("inf")
    return tl.where((lam_v == 0.0) & ~number, 0.0, v)


@triton.jit
def faded(a, x, GAPS: tl.constexpr):
    """The product a x; with gaps, ``a`` is the number w that ``over_gap`` returns."""
    return tl.where(a < 0.0, 0.0, x) - a * x if GAPS else a * x


@triton.jit
def decay_of(w):
    """The decay that ``over_gap`` represents as w."""
    return tl.where(w < 0.0, -w, 1.0 - w)


@triton.jit
def filter_step(a, p, phi, b, s, mu, GAPS: tl.constexpr):
    """One token in moment form: the new variance and mean, and the retention r."""
    # a (a s), never a^2 s: the rounding error of a stored a^2 would be the same in every step.
    P = faded(a, faded(a, s, GAPS), GAPS) + p
    r = reciprocal(1.0 + phi * P)
    return P * r, r * (faded(a, mu, GAPS) + P * b), r


@triton.jit
def over_gap(L, half, dt):
    """The decay over a gap as one number w, and the effective time h of its noise.

    Over a short gap w is what decays, u = 1 - exp(-L dt), which keeps the digits of many small
    steps; over a long one it is minus what remains, exp(-L dt), whose digits 1 - u would lose.

    h is the integral of exp(-2 L t) from 0 to dt, that is u (1 - u / 2) / L, or dt without decay;
    ``half`` is 1 / (2 L). Below an exponent of 1/2 both come from a series, because 1 - exp would
    lose digits there.
    """
    # Enough terms for a relative error of 1e-17 in float64 and 1e-8 in float32.
    TERMS: tl.constexpr = 15 if L.dtype == tl.float64 else 9
    z = L * dt
    series = tl.full(z.shape, 1.0, z.dtype)
    for i in tl.static_range(TERMS):
        series = 1.0 - z * (1.0 / (TERMS + 1 - i)) * series
    # exp(-80) is 2e-35: nothing visible remains, but it must not underflow to 0, because the sign
    # of w says which of the two forms it is.
    left = tl.exp(-tl.minimum(z, 80.0))
    u = tl.where(z < 0.5, z * series, 1.0 - left)
    time = tl.where(z < 0.5, dt * series, 2.0 * (u * half))
    return tl.where(z < 0.5, u, -left), time - 0.5 * (u * time)


@triton.jit
def gap_moment(L, half, dt, w, h):
    """The integral of t exp(-2 L t) from 0 to dt: minus the derivative of h by 2 L."""
    # Enough terms for the relative errors of ``over_gap``, up to y = 1.
    TERMS: tl.constexpr = 19 if L.dtype == tl.float64 else 12
    y = 2.0 * (L * dt)
    series = tl.full(y.shape, 1.0, y.dtype)
    for i in tl.static_range(TERMS):
        # In one expression: as a named variable the ratio would become a float32.
        series = 1.0 - y * ((TERMS - i + 1.0) / ((TERMS - i) * (TERMS - i + 2.0))) * series
    a = decay_of(w)
    return tl.where(y < 1.0, 0.5 * (dt * (dt * series)), (h - dt * (a * a)) * half)


@triton.jit
def gap_adjoint(L, half, unit, p, dt, s, mu_g, dP):
    """Gradients with respect to L = -log a_bar, p_bar and a gap.

    ``unit`` is 1 / h(1) and p is p_bar unit. mu_g is the sum of mu dm over the slots of a block,
    where dm is the gradient with respect to the predicted mean.
    """
    one = tl.full(dt.shape, 1.0, dt.dtype)
    w, h = over_gap(L, half, dt)
    w_1, h_1 = over_gap(L, half, one)
    a, a_1, share = decay_of(w), decay_of(w_1), unit * h
    # The noise of a gap is p_bar h(dt) / h(1): it does not change with L for a gap of one unit. For
    # a fast rate (L > 0.375: over half of a variance decays in one unit) both moments are nearly h
    # / (2 L) and cancel, so that part is left out from the start.
    slow = gap_moment(L, half, dt, w, h) - gap_moment(L, half, one, w_1, h_1) * share
    fall = tl.where(L > 0.375, half * (a_1 * a_1 * share - dt * (a * a)), slow)
    dL = -(dt * (a * mu_g)) - 2.0 * dP * (s * (dt * (a * a)) + p * fall)
    ddt = a * (a * ((p - 2.0 * L * s) * dP)) - L * (a * mu_g)
    return dL, share * dP, ddt


@triton.jit
def remainder(k, k2, v, m, r):
    """Residual of a value after the update, k v - |k|^2 mu', without cancellation.

    m is the predicted mean. With one slot per block it is computed as k times a residual, which
    saves one rounding.
    """
    if k.shape[0] == 1:
        return k[:, :, None] * (r * (v[None, None, :] - k[:, :, None] * m))
    else:
        return r * (k[:, :, None] * v[None, None, :] - k2[:, :, None] * m)


@triton.jit
def filter_adjoint(a, k2, lam_v, mu, s_new, mu_new, r, rest, dmu, ds, GAPS: tl.constexpr):
    """Adjoint of ``filter_step``: dmu and ds before the token, mu_g, dP, db, dphi, dlam_v.

    mu is the mean before the token, s_new and mu_new the belief after it and ``rest`` the residual
    of its value; dmu and ds are the adjoints of the belief after it. mu_g is the sum of mu dm over
    the slots of a block, where dm is the adjoint of the predicted mean. dlam_v is
    k2 dphi + v sum k db, in a form in which the two do not cancel under strong evidence.
    """
    g = r * dmu
    s_ds = s_new * ds
    rest_dmu = per_block(rest * dmu)
    dP = r * (r * ds + lam_v[None, None, :] * rest_dmu)
    ds_back = faded(a, faded(a, dP, GAPS), GAPS)
    dphi = -(s_new * (per_block(mu_new * dmu) + s_ds))
    dlam_v = s_new * (rest_dmu - k2[:, :, None] * s_ds)
    return faded(a, g, GAPS), ds_back, per_block(mu * g), dP, s_new * dmu, dphi, dlam_v


@triton.jit
def filter_then(a, p, phi, b, s, mu, gain, J, eta, GAPS: tl.constexpr):
    """``FilterMap.then``: a segment (s, mu, gain, J, eta) followed by one token."""
    s_new, mu_new, r = filter_step(a, p, phi, b, s, mu, GAPS)
    before = faded(a, gain, GAPS)
    gain = r * before
    e = b - phi * faded(a, mu, GAPS)
    return s_new, mu_new, gain, J + phi * before * gain, eta + gain * e


@triton.jit
def adjoint_then(a, r, e, dmu, ds, gain, cross, dmu_0, ds_0, GAPS: tl.constexpr):
    """``AdjointMap.then``: the adjoint of a segment, followed by one token.

    dmu and ds are what the outputs of the token add to the adjoint of its belief.
    """
    gain = faded(a, r * gain, GAPS)
    cross = faded(a, r * cross, GAPS) + gain * (gain * e)
    return gain, cross, dmu_0 + gain * dmu, ds_0 + per_block(cross * dmu) + gain * (gain * ds)
