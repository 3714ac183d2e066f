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

// a^2 = keep + rest, with keep = 1 for slow decay and 0 for fast decay.
template <class V>
struct Decay {
  V a, keep, rest;
};

// A memory of tens of thousands of tokens has a^2 within a few roundings of 1. Multiplying by such a
// number rounds the same way in every step, and the error adds up: 2e-3 of the variance after 65,536
// tokens. 1 - a^2 is small and known to full relative precision, so s - (1 - a^2) s has no such drift.
template <class V>
KLA_LANE Decay<V> split_decay(V a) {
  const V zero = a - a, one = zero + 1;
  const V keep = a * a + a * a > one ? one : zero;
  const V rest = a * a + a * a > one ? (a - 1) * (a + 1) : a * a;
  return {a, keep, rest};
}

template <class V>
struct FilterStep {
  V s, mu;  // the new belief
  V r;      // 1 / (1 + phi P)
};

// One token in moment form: P = a^2 s + p, r = 1 / (1 + phi P), s' = P r, mu' = r (a mu + P b). The new
// variance is rounded once, after r: the evidence dithers that rounding, so it does not drift either.
template <class V>
KLA_LANE FilterStep<V> filter_step(Decay<V> f, V p, V phi, V b, V s, V mu) {
  V kept = f.keep * s;
  V moved = f.rest * s + p;
  V P = kept + moved;
  V r = 1 / (1 + phi * P);
  return {kept * r + moved * r, r * (f.a * mu + P * b), r};
}

template <class V>
struct FilterGrad {
  V dmu, ds;  // adjoints of the belief before the token
  V da, dp, db, dphi;
};

// Adjoint of filter_step. s and mu are the belief before the token, s_new the variance after it; dmu
// and ds are the adjoints of the new belief. r comes from the replay: 1 - phi s_new would cancel.
template <class V>
KLA_LANE FilterGrad<V> filter_adjoint(Decay<V> f, V phi, V b, V s, V mu, V s_new, V r, V dmu, V ds) {
  V g = r * dmu;
  V gm = g * (f.a * mu);
  V dS = ds + b * dmu;
  V dP = r * (r * dS - phi * gm);
  V a_dP = f.a * dP;
  return {f.a * g, f.keep * dP + f.rest * dP, mu * g + s * (a_dP + a_dP), dP, s_new * dmu,
          -(s_new * (s_new * dS + gm))};
}

}  // namespace kla
#endif
