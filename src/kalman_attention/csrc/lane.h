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
};

// One token in moment form. P is a (a s) + p and never a^2 s + p: the rounding of a stored a^2 would
// be the same in every step and add up.
template <class V>
KLA_LANE FilterStep<V> filter_step(V a, V p, V phi, V b, V s, V mu) {
  V P = a * (a * s) + p;
  V r = 1 / (1 + phi * P);
  return {P * r, r * (a * mu + P * b), r};
}

template <class V>
struct FilterGrad {
  V dmu, ds;  // adjoints of the belief before the token
  V da, dp, db, dphi;
};

// Adjoint of filter_step. s and mu are the belief before the token, s_new the variance after it; dmu
// and ds are the adjoints of the new belief. r comes from the replay: 1 - phi s_new would cancel.
template <class V>
KLA_LANE FilterGrad<V> filter_adjoint(V a, V phi, V b, V s, V mu, V s_new, V r, V dmu, V ds) {
  V g = r * dmu;
  V gm = g * (a * mu);
  V dS = ds + b * dmu;
  V dP = r * (r * dS - phi * gm);
  V a_dP = a * dP;
  return {a * g, a * a_dP, mu * g + s * (a_dP + a_dP), dP, s_new * dmu, -(s_new * (s_new * dS + gm))};
}

}  // namespace kla
#endif
