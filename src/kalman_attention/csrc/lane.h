// Arithmetic of one lane (one slot n of one channel d), for any value type V with + - * /: float,
// double, a SIMD vector, or a GPU register. Both passes of every native engine are built on it.
#ifndef KLA_LANE_H
#define KLA_LANE_H

#if defined(__CUDACC__)
#define KLA_LANE __host__ __device__ __forceinline__
#else
#define KLA_LANE static inline __attribute__((always_inline))
#endif

namespace kla {

// The value of a token as the filter reads it: without evidence nothing is seen, so what is not a number
// there reads as 0. (A number is kept: the gradient by lam_v needs it.)
template <class V>
KLA_LANE V seen(V v, V lam_v) {
  return (lam_v == 0) & (v - v != 0) ? V{} : v;
}

// lam_v v of such a token, in fewer operations.
template <class V>
KLA_LANE V information(V v, V lam_v) {
  return lam_v == 0 ? V{} : lam_v * v;
}

template <class V>
struct FilterStep {
  V s, mu;  // the new belief
  V r;      // 1 / (1 + phi P)
};

// One token in moment form. P is a (a s) + p and never a^2 s + p: the rounding of a stored a^2 would
// be the same in every step and add up. The mean is a sum of what is left of the prediction and what the
// token brings, never the prediction and a correction: strong evidence would leave nothing but the
// rounding of the prediction.
template <class V>
KLA_LANE FilterStep<V> filter_step(V a, V p, V phi, V b, V s, V mu) {
  V P = a * (a * s) + p;
  V r = 1 / (1 + phi * P);
  V s_new = P * r;
  return {s_new, (a * r) * mu + s_new * b, r};
}

// What a token says beyond the predicted mean m, as information.
template <class V>
KLA_LANE V innovation(V phi, V b, V m) {
  return b - phi * m;
}

// What the new mean leaves of a value, v - k mu', without the difference of two numbers that agree the
// better the stronger the evidence is.
template <class V>
KLA_LANE V remainder(V k, V v, V m, V r) {
  return r * (v - k * m);
}

template <class V>
struct FilterGrad {
  V dmu, ds;  // adjoints of the belief before the token
  V da, dp;
  V db, dphi;  // of the information and the precision that the token brings
  V dlam_v;    // sum of both, over k: what the slot adds to the gradient by lam_v
};

// Adjoint of filter_step. (s, mu) is the belief before the token, `next` what the step made of it and rest
// the remainder of its value; dmu and ds are the adjoints of the new belief. dlam_v is k (k dphi + v db), written
// so that the two do not cancel under strong evidence. No a^2 here either, and no division by a.
template <class V>
KLA_LANE FilterGrad<V> filter_adjoint(V a, V k, V k2, V lam_v, V s, V mu, const FilterStep<V>& next, V rest,
                                      V dmu, V ds) {
  V g = next.r * dmu;
  V s_ds = next.s * ds;
  V k_rest = k * (rest * dmu);
  V dP = next.r * (next.r * ds + lam_v * k_rest);
  V a_dP = a * dP;
  V dphi = -(next.s * (next.mu * dmu + s_ds));
  V dlam_v = next.s * (k_rest - k2 * s_ds);
  return {a * g, a * a_dP, mu * g + s * (a_dP + a_dP), dP, next.s * dmu, dphi, dlam_v};
}

}  // namespace kla
#endif
