// The step to a token: decay and noise of one unit of time, or of the gap before it. Those of a gap are computed
// where they are used and never stored.
#ifndef KLA_CPU_GAPS_H
#define KLA_CPU_GAPS_H

#include <cmath>

#include "../lane.h"
#include "exp.h"
#include "tile.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

// The dynamics when every step is one unit of time: decay a and noise variance p.
template <class V>
struct Steady {
  V a, p;
  KLA_METHOD V noise() const { return p; }
  KLA_METHOD V predicted(V s) const { return a * (a * s) + p; }
};

// The same over a gap: a variance moves towards the stationary s_inf by a fraction 1 - a^2 of the distance. Over a
// short gap (near = 1) the change is computed, because a^2 does not have the digits of 1 - a^2, and errors would add
// up over many short gaps; over a long one, the remaining distance.
template <class V>
struct Passed {
  V a, near, factor, lost, s_inf;  // e^u, its power of two, a^2 - 1 of a short gap and a^2 of a long one, 1 - a^2
  KLA_METHOD V noise() const { return s_inf * lost; }
  KLA_METHOD V predicted(V s) const { return (near == 1 ? s : s_inf) + factor * (s - s_inf); }
};

// filter_step of lane.h with such dynamics, its products in the shortest chain.
template <class V, class Dynamics>
KLA_INLINE FilterStep<V> filter_token(const Dynamics& to, V phi, V b, V s, V mu) {
  V P = to.predicted(s);
  V r = 1 / (1 + phi * P);
  V s_new = P * r;
  return {s_new, (to.a * r) * mu + s_new * b, r};
}

// The same if the predicted mean m is already known: one product less.
template <class V, class Dynamics>
KLA_INLINE FilterStep<V> filter_predicted(const Dynamics& to, V phi, V b, V s, V m) {
  V P = to.predicted(s);
  V r = 1 / (1 + phi * P);
  return {P * r, (m + P * b) * r, r};
}

// A token for a block of slots that share a variance (filtering/blocks.py). A slot's mean is then
// keep mu + k gain.
template <class V>
struct BlockStep {
  V s;           // the new variance
  V r;           // 1 / (1 + phi P)
  V keep, gain;  // a r, and s lam_v v
};

template <class V, class Dynamics>
KLA_INLINE BlockStep<V> filter_block(const Dynamics& to, V phi, V lv, V s) {
  V P = to.predicted(s);
  V r = 1 / (1 + phi * P);
  V s_new = P * r;
  return {s_new, r, to.a * r, s_new * lv};
}

// The decay over a gap, e^u with u = l dt <= 0, from e^r - 1 = r + r^2 (1/2 + r (1/6 + ...)). Float has the
// polynomial of degree 4 that fits best (2e-8 of e^r - 1), double the series.
template <class T>
constexpr int kDecayTerms = sizeof(T) == 4 ? 5 : 13;

template <class T, int Term>
struct DecayPolynomial {
  static constexpr double kFit[] = {0.5, 0.16666576305560962, 0.04166655376258206, 0.008363292752978773,
                                    0.001392632561681616};
  static constexpr T kTerm = sizeof(T) == 4 ? T(kFit[Term < 5 ? Term : 0]) : inverse_factorial<T>(Term + 2);
  KLA_INLINE Vec<T> of(Vec<T> r) {
    if constexpr (Term == kDecayTerms<T> - 1) return splat(kTerm);
    else return DecayPolynomial<T, Term + 1>::of(r) * r + kTerm;
  }
};

template <class V>
struct Decay {
  V u, near, part, beyond;  // e^u = near (1 + part), near a power of two; part - u where near is 1

  KLA_METHOD V whole() const { return near + near * part; }
  KLA_METHOD V lost(V left) const { return near == 1 ? -change() : 1 - left; }  // 1 - e^(2 u)
  KLA_METHOD V change() const { return part * (2 + part); }                     // its negative over a short gap
};

// One part of ln 2 is enough: u is a rounded product already, and for n = 0 it is not used.
template <class T>
KLA_INLINE Decay<Vec<T>> decay(Vec<T> u) {
  using C = ExpConstants<T>;
  using Int = typename C::Int;
  constexpr T kShift = C::kRound + C::kBias;  // the low bits of the sum are an exponent
  u = at_least<T>(C::kLeast, u);
  const Vec<T> shifted = u * T(1.44269504088896340736) + kShift;
  const Vec<T> r = u - (shifted - kShift) * T(0.69314718055994530942);
  const Vec<T> near = (Vec<T>)((Int)shifted << C::kMantissa);
  const Vec<T> beyond = (r * r) * DecayPolynomial<T, 0>::of(r);
  return {u, near, r + beyond, beyond};
}

// Of the channels that are left over.
template <class T>
KLA_INLINE Decay<T> decay_of(T u) {
  return u > T(-0.3) ? Decay<T>{u, T(1), std::expm1(u), T(0)} : Decay<T>{u, std::exp(u), T(0), T(0)};
}
KLA_INLINE Decay<Vec<float>> decay_of(Vec<float> u) { return decay<float>(u); }
KLA_INLINE Decay<Vec<double>> decay_of(Vec<double> u) { return decay<double>(u); }

template <class V>
KLA_INLINE Passed<V> passed(const Decay<V>& gap, V s_inf) {
  const V a = gap.whole(), left = a * a;
  return {a, gap.near, gap.near == 1 ? gap.change() : left, gap.lost(left), s_inf};
}

// The step to a token, from the fields of its block in a tile of X lanes; dt is read with GAPS only.
template <bool GAPS, class T, int X>
KLA_INLINE auto dynamics(const T* lane, Vec<T> dt) {
  const Vec<T> a = load(lane + kA * X), p = load(lane + kP * X);
  if constexpr (GAPS) return passed<Vec<T>>(decay<T>(a * dt), p);
  else return Steady<Vec<T>>{a, p};
}

// Adds what a token brings to the sums of kla_scan.h for the dynamics and returns its part of ddt. a = e^u; du
// is the adjoint of u = l dt through the decay of the belief, dP that of the predicted variance.
template <class T, int X>
KLA_INLINE Vec<T> add_gap(T* lane, const Decay<Vec<T>>& gap, Vec<T> a, Vec<T> du, Vec<T> dP) {
  using V = Vec<T>;
  const V l = load(lane + kA * X), left = a * a, share = gap.lost(left), left_u = 2 * gap.u * left;
  const V noise = load(lane + kP * X) * dP;
  // How the noise grows with the rate, 1 - (1 + y) e^-y with y = -2 u, over a short gap as
  // y (1 - e^-y) - w^2 - 2 (w - u): no difference of numbers that agree in more than a digit. Of a fast rate
  // only what depends on the gap, -y e^-y: the rest is nearly all of it, and would be taken off again.
  const V w = gap.part;
  const V slow = gap.near == T(1) ? -(2 * gap.u * share + (w * w + 2 * gap.beyond)) : share + left_u;
  const V slope = l < T(KLA_FAST_RATE) ? left_u : slow;
  store(lane + kDa * X, load(lane + kDa * X) + (gap.u * du - slope * noise));
  store(lane + kDp * X, load(lane + kDp * X) + share * dP);
  return l * (du - 2 * (left * noise));
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
