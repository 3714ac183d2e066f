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

// The decay a of a step over a gap, as one number: what it takes away, w = 1 - a, over a short gap, where
// a x is x - w x and keeps the digits of many small steps; and w = -a over a long one, where 1 - a would not
// have those of a. It may stand wherever a decay does.
template <class V>
struct Fading {
  V w;
};

template <class V>
KLA_LANE V operator*(Fading<V> a, V x) {
  return (a.w < 0 ? V{} : x) - a.w * x;
}

// What a token does to a variance, for all slots that share it.
template <class V>
struct VarianceStep {
  V P, s;  // predicted, and after the token
  V r;     // 1 / (1 + phi P)
};

// P is a (a s) + p and never a^2 s + p: the rounding of a stored a^2 would be the same in every step and
// add up.
template <class V, class A>
KLA_LANE VarianceStep<V> variance_step(A a, V p, V phi, V s) {
  V P = a * (a * s) + p;
  V r = 1 / (1 + phi * P);
  return {P, P * r, r};
}

// The mean after the token, from the predicted mean m. It is a sum of what is left of the prediction and
// what the token brings, never the prediction and a correction: strong evidence would leave nothing but
// the rounding of the prediction.
template <class V>
KLA_LANE V mean_step(const VarianceStep<V>& next, V m, V b) {
  return next.r * m + next.s * b;
}

template <class V>
struct FilterStep {
  V s, mu;  // the new belief
  V r;      // 1 / (1 + phi P)
};

// One token in moment form.
template <class V, class A>
KLA_LANE FilterStep<V> filter_step(A a, V p, V phi, V b, V s, V mu) {
  const auto next = variance_step<V>(a, p, phi, s);
  return {next.s, mean_step<V>(next, a * mu, b), next.r};
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

// The same for a slot that shares its variance, k v - |k|^2 mu', where k2 is |k|^2 of its block.
template <class V>
KLA_LANE V block_remainder(V k, V k2, V v, V m, V r) {
  return r * (k * v - k2 * m);
}

// What the slots that share a variance have in common in the adjoint of a token.
template <class V>
struct BlockGrad {
  V dP, dphi;
  V dlam_v;  // k2 dphi + v sum k db, written so that the two do not cancel under strong evidence
};

// rest_dmu and mu_dmu are sums over the slots: of what is left of the value, and of the new mean, times the
// adjoint of the new mean. ds is the adjoint of the new variance.
template <class V>
KLA_LANE BlockGrad<V> block_adjoint(V k2, V lam_v, V s_new, V r, V rest_dmu, V mu_dmu, V ds) {
  V s_ds = s_new * ds;
  return {r * (r * ds + lam_v * rest_dmu), -(s_new * (mu_dmu + s_ds)), s_new * (rest_dmu - k2 * s_ds)};
}

template <class V>
struct FilterGrad {
  V dmu, ds;  // adjoints of the belief before the token
  V da, dp;
  V db, dphi;  // of the information and the precision that the token brings
  V dlam_v;    // sum of both, over k: what the slot adds to the gradient by lam_v
};

// Adjoint of filter_step. (s, mu) is the belief before the token, `next` what the step made of it and rest
// the remainder of its value; dmu and ds are the adjoints of the new belief. No a^2 here either, and no
// division by a.
template <class V, class A>
KLA_LANE FilterGrad<V> filter_adjoint(A a, V k, V k2, V lam_v, V s, V mu, const FilterStep<V>& next, V rest,
                                      V dmu, V ds) {
  const auto block = block_adjoint<V>(k2, lam_v, next.s, next.r, k * (rest * dmu), next.mu * dmu, ds);
  V g = next.r * dmu, a_dP = a * block.dP;
  return {a * g, a * a_dP, mu * g + s * (a_dP + a_dP), block.dP, next.s * dmu, block.dphi, block.dlam_v};
}

}  // namespace kla
#endif
