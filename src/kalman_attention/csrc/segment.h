// The effect of a segment of tokens on any belief that enters it, and on its adjoint. Built token by token,
// for any value type V as in lane.h. This allows time to be split: summarise the segments in parallel, carry
// the belief from one to the next, then filter each segment exactly.
#ifndef KLA_SEGMENT_H
#define KLA_SEGMENT_H

#include "lane.h"

namespace kla {

// The projective map of filtering/maps.py, divided by its entry ww, in numbers that stay bounded: s and mu
// are the belief that results from starting at 0 with certainty, gain multiplies any other start, and J and
// eta are what the tokens say about that start (precision, information).
// xw = s, uw = mu, wx = J, uu = gain, xx = gain^2 + s J, ux = gain eta + mu J.
template <class V>
struct FilterMap {
  V s, mu, gain, J, eta;
};

template <class V, class A>
KLA_LANE FilterMap<V> then_token(const FilterMap<V>& m, A a, V p, V phi, V b) {
  const auto next = filter_step<V>(a, p, phi, b, m.s, m.mu);
  V before = a * m.gain;
  V gain = next.r * before;
  V e = innovation<V>(phi, b, a * m.mu);
  return {next.s, next.mu, gain, m.J + (phi * before) * gain, m.eta + gain * e};
}

// The belief after the segment, from the belief (s, mu) before it.
template <class V>
KLA_LANE void apply(const FilterMap<V>& m, V& s, V& mu) {
  V scale = 1 / (1 + m.J * s);
  mu = m.mu + m.gain * ((mu + s * m.eta) * scale);
  s = m.s + m.gain * (m.gain * (s * scale));
}

// Given the beliefs, the adjoint is affine: dmu -> gain dmu + dmu_0 and ds -> gain^2 ds + cross dmu + ds_0,
// where dmu_0 and ds_0 come from the gradients with respect to the outputs. Built forward in time; applied,
// the last token comes first.
template <class V>
struct AdjointMap {
  V gain, cross, dmu_0, ds_0;
};

// r is that of filter_step and e the innovation; dy and dy_var the gradients that the token adds to dmu and ds.
template <class V, class A>
KLA_LANE AdjointMap<V> then_token(const AdjointMap<V>& m, A a, V r, V e, V dy, V dy_var) {
  V c = a * r;
  V gain = c * m.gain;
  V cross = c * m.cross + gain * (gain * e);
  return {gain, cross, m.dmu_0 + gain * dy, m.ds_0 + cross * dy + gain * (gain * dy_var)};
}

// The adjoint before the segment, from the adjoint after it.
template <class V>
KLA_LANE void apply(const AdjointMap<V>& m, V& ds, V& dmu) {
  ds = m.gain * (m.gain * ds) + m.cross * dmu + m.ds_0;
  dmu = m.gain * dmu + m.dmu_0;
}

}  // namespace kla
#endif
