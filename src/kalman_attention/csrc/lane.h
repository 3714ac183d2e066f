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
  V e;      // the innovation, b - phi a mu
};

// What a token says beyond the prediction.
template <class V>
KLA_LANE V innovation(V phi, V b, V m) {
  return b - phi * m;
}

// One token in moment form. P is a (a s) + p and never a^2 s + p: the rounding of a stored a^2 would
// be the same in every step and add up.
template <class V>
KLA_LANE FilterStep<V> filter_step(V a, V p, V phi, V b, V s, V mu) {
  V P = a * (a * s) + p;
  V r = 1 / (1 + phi * P);
  V s_new = P * r;
  V m = a * mu;
  V e = innovation(phi, b, m);
  return {s_new, m + s_new * e, r, e};
}

// The belief after a token and nothing else: a quotient where filter_step has a reciprocal and a product.
template <class V>
KLA_LANE void filter_next(V a, V p, V phi, V b, V& s, V& mu) {
  V P = a * (a * s) + p;
  V m = a * mu;
  s = P / (1 + phi * P);
  mu = m + s * innovation(phi, b, m);
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

// filter_adjoint over stored steps, in fewer products. (s, mu) is the belief after the token, c = a r and e
// are those of its step, and u = s ds + mu dmu. What is missing follows at the end of the walk, summed over the
// beliefs before the tokens: a da = sum (mu dmu + 2 s ds) and a^2 dp = sum ds.
template <class V>
struct WalkGrad {
  V dmu, ds;  // adjoints of the belief before the token
  V db, dphi;
};

template <class V>
KLA_LANE WalkGrad<V> walk_back(V c, V e, V s, V u, V dmu, V ds) {
  return {c * dmu, c * (c * (ds + e * dmu)), s * dmu, -(s * u)};
}

// A stretch of tokens as one linear map of (x, w, u), where s = x / w and mu = u / w: the matrix
// ((xx, xw, 0), (wx, ww, 0), (ux, uw, uu)) of filtering/projective.py. Only its directions count, so it
// may be scaled freely.
template <class V>
struct Projective {
  V xx, xw, wx, ww, ux, uw, uu;
};

// The map of no token at all.
template <class V>
KLA_LANE Projective<V> projective_identity() {
  return {V(1), V(0), V(0), V(1), V(0), V(0), V(1)};
}

// The map m followed by one token, with a (a x) as in filter_step.
template <class V>
KLA_LANE Projective<V> projective_then(const Projective<V>& m, V a, V p, V phi, V b) {
  V xx = a * (a * m.xx) + p * m.wx;
  V xw = a * (a * m.xw) + p * m.ww;
  return {xx, xw, m.wx + phi * xx, m.ww + phi * xw, a * m.ux + b * xx, a * m.uw + b * xw, a * m.uu};
}

// The same map times a number.
template <class V>
KLA_LANE Projective<V> projective_scale(const Projective<V>& m, V c) {
  return {m.xx * c, m.xw * c, m.wx * c, m.ww * c, m.ux * c, m.uw * c, m.uu * c};
}

// The belief after the map, from the belief before it; in place.
template <class V>
KLA_LANE void projective_apply(const Projective<V>& m, V& s, V& mu) {
  V inverse = 1 / (m.wx * s + m.ww);
  mu = (m.ux * s + m.uw + m.uu * mu) * inverse;
  s = (m.xx * s + m.xw) * inverse;
}

}  // namespace kla
#endif
