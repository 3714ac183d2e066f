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

template <class V>
struct FilterStep {
  V s, mu;  // the new belief
  V r;      // 1 / (1 + phi P)
  V e;      // b - phi a mu: what the token says beyond the prediction
};

// One token in moment form. P is a (a s) + p and never a^2 s + p: the rounding of a stored a^2 would
// be the same in every step and add up.
template <class V>
KLA_LANE FilterStep<V> filter_step(V a, V p, V phi, V b, V s, V mu) {
  V P = a * (a * s) + p;
  V r = 1 / (1 + phi * P);
  V s_new = P * r;
  V m = a * mu;
  V e = b - phi * m;
  return {s_new, m + s_new * e, r, e};
}

template <class V>
struct FilterGrad {
  V dmu, ds;  // adjoints of the belief before the token
  V da, dp, db, dphi;
};

// Adjoint of filter_step. (s, mu) is the belief before the token and `next` what the step made of it;
// dmu and ds are the adjoints of the new belief. No a^2 here either.
template <class V>
KLA_LANE FilterGrad<V> filter_adjoint(V a, V s, V mu, const FilterStep<V>& next, V dmu, V ds) {
  V g = next.r * dmu;
  V dP = next.r * (next.r * (ds + next.e * dmu));
  V a_dP = a * dP;
  V dphi = -(next.s * (next.s * ds + next.mu * dmu));
  return {a * g, a * a_dP, mu * g + s * (a_dP + a_dP), dP, next.s * dmu, dphi};
}

}  // namespace kla
#endif
