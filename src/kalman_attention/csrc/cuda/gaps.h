// Decay and noise of a step: the same for all tokens, or over the time that passes before each of them.
//
// The decay over a short gap is represented by what decays, u = 1 - exp(-L dt) with L = -log a_bar, which has all
// its digits where steps are small. So has the effective time h of the noise of a gap, the integral of exp(-2 L t)
// from 0 to dt, u (1 - u / 2) / L. The noise of a gap is p_bar h(dt) / h(1). Without decay u = 0 and h = dt; a gap
// of 0 has u = h = 0, so a step over it is the identity. See Fading in lane.h.
#ifndef KLA_CUDA_GAPS_H
#define KLA_CUDA_GAPS_H

#ifdef KLA_EMULATE_CUDA
#include <cmath>
#endif
#include "../segment.h"
#include "memory.h"

namespace kla {

KLA_DEVICE float exponential(float x) { return expf(x); }
KLA_DEVICE double exponential(double x) { return exp(x); }

// The step to one token: the decay (a number, or a Fading) and the variance of its noise.
template <class A, class T>
struct Transition {
  A a;
  T p;
};

template <class T>
struct Gap {
  T w, h;  // the decay as a Fading has it, and the time that its noise counts for

  KLA_DEVICE T decay() const { return w < 0 ? -w : T(1) - w; }
};

// Below this exponent the mean of exp(-x) over [0, z] is summed as a series, above it is as written; terms
// for 1e-8 and 1e-17.
template <class T>
constexpr int kMeanTerms = sizeof(T) == 8 ? 15 : 9;

// half is 1 / (2 L).
template <class T>
KLA_DEVICE Gap<T> gap(T L, T half, T dt) {
  const T z = L * dt;
  T series = T(1);
  KLA_UNROLL
  for (int j = kMeanTerms<T>; j > 0; --j) series = T(1) - z * (T(1) / T(j + 1)) * series;
  const bool small = z < T(0.5);
  // Nothing visible remains after a long gap, but the number must not underflow to 0, because its sign matters.
  const T left = exponential(-(z < T(80) ? z : T(80)));
  const T u = small ? z * series : T(1) - left;
  const T time = small ? dt * series : 2 * (u * half);
  return {small ? u : -left, time - T(0.5) * (u * time)};
}

// Beyond this rate over half of a variance decays in one unit of time, and another form of the gradient is accurate.
constexpr double kFastRate = 0.375;

template <class T>
constexpr int kMomentTerms = sizeof(T) == 8 ? 19 : 12;

// The integral of t exp(-2 L t) from 0 to dt, that is how h falls with 2 L; a series below exponent 1.
template <class T>
KLA_DEVICE T gap_moment(T L, T half, T dt, const Gap<T>& gap) {
  const T y = 2 * (L * dt), a = gap.decay();
  T series = T(1);
  KLA_UNROLL
  for (int j = kMomentTerms<T>; j > 0; --j) series = T(1) - y * (T(j + 1) / T(j * (j + 2))) * series;
  return y < T(1) ? T(0.5) * (dt * (dt * series)) : (gap.h - dt * (a * a)) * half;
}

// The dynamics of OWN variances of a thread, as a step reads them.
template <class T, bool GAPS, int OWN>
struct Dynamics {
  T a[OWN], p[OWN];

  KLA_DEVICE void prepare() {}
  KLA_DEVICE Transition<T, T> step(int o, T) const { return {a[o], p[o]}; }
};

template <class T, int OWN>
struct Dynamics<T, true, OWN> {
  T a[OWN], p[OWN];  // L and p_bar, then p_bar / h(1)
  T half[OWN], unit[OWN];  // 1 / (2 L) and 1 / h(1)

  KLA_DEVICE void prepare() {
    for (int o = 0; o < OWN; ++o) {
      half[o] = T(0.5) / a[o];
      unit[o] = T(1) / over(o, T(1)).h;
      p[o] *= unit[o];
    }
  }

  KLA_DEVICE Gap<T> over(int o, T dt) const { return gap<T>(a[o], half[o], dt); }

  KLA_DEVICE Transition<Fading<T>, T> step(int o, T dt) const {
    const Gap<T> gap = over(o, dt);
    return {{gap.w}, p[o] * gap.h};
  }
};

}  // namespace kla
#endif
