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

// The value of a token as the filter reads it: 0 where it is not finite and there is no evidence. (A finite
// value is kept: the gradient with respect to lam_v needs it.)
template <class V>
KLA_LANE V seen(V v, V lam_v) {
  return (lam_v == 0) & (v - v != 0) ? V{} : v;
}

// lam_v v of such a token, in fewer operations.
template <class V>
KLA_LANE V information(V v, V lam_v) {
  return lam_v == 0 ? V{} : lam_v * v;
}

// The decay a of a step over a gap, as one number: w = 1 - a over a short gap, where a x = x - w x keeps the
// digits of many small steps, and w = -a over a long one, where 1 - a would lose those of a. It can be used
// wherever a decay can.
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

// P is a (a s) + p and never a^2 s + p: the rounding error of a stored a^2 would be the same in every step
// and add up.
template <class V, class A>
KLA_LANE VarianceStep<V> variance_step(A a, V p, V phi, V s) {
  V P = a * (a * s) + p;
  V r = 1 / (1 + phi * P);
  return {P, P * r, r};
}

// The mean after the token, from the predicted mean m: the sum of what remains of the prediction and what
// the token adds, never the prediction plus a correction, which under strong evidence would leave nothing
// but the rounding error of the prediction.
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

// The innovation of a token with respect to the predicted mean m, as information.
template <class V>
KLA_LANE V innovation(V phi, V b, V m) {
  return b - phi * m;
}

// The residual of a value after the update, v - k mu', without subtracting two numbers that agree more and
// more as the evidence gets stronger.
template <class V>
KLA_LANE V remainder(V k, V v, V m, V r) {
  return r * (v - k * m);
}

// The same for a slot that shares its variance, k v - |k|^2 mu', where k2 is |k|^2 of its block.
template <class V>
KLA_LANE V block_remainder(V k, V k2, V v, V m, V r) {
  return r * (k * v - k2 * m);
}

// The part of the adjoint of a token that slots with a shared variance have in common.
template <class V>
struct BlockGrad {
  V dP, dphi;
  V dlam_v;  // k2 dphi + v sum k db, in a form in which the two do not cancel under strong evidence
};

// rest_dmu and mu_dmu are sums over the slots: of the residual of the value, and of the new mean, times the
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
  V db, dphi;  // of the information and the precision that the token adds
  V dlam_v;    // sum of both, over k: what the slot adds to the gradient with respect to lam_v
};

// Adjoint of filter_step. (s, mu) is the belief before the token, `next` the result of the step and rest the
// residual of its value; dmu and ds are the adjoints of the new belief. There is no a^2 here either, and no
// division by a, which may be 0.
template <class V, class A>
KLA_LANE FilterGrad<V> filter_adjoint(A a, V k, V k2, V lam_v, V s, V mu, const FilterStep<V>& next, V rest,
                                      V dmu, V ds) {
  const auto block = block_adjoint<V>(k2, lam_v, next.s, next.r, k * (rest * dmu), next.mu * dmu, ds);
  V g = next.r * dmu, a_dP = a * block.dP;
  return {a * g, a * a_dP, mu * g + s * (a_dP + a_dP), block.dP, next.s * dmu, block.dphi, block.dlam_v};
}

}  // namespace kla
#endif
