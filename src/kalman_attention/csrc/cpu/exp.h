// exp of a vector, to about one unit in the last place: x = n ln 2 + r, a Taylor polynomial in r, and n
// put into the exponent. Below about -86.6 (float) or -707.7 (double) the result is 0, NaN stays NaN.
// SiLU and softplus are made of it.
#ifndef KLA_CPU_EXP_H
#define KLA_CPU_EXP_H

#include "vector.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

template <class T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  typedef int32_t Int __attribute__((vector_size(KLA_VECTOR_BYTES)));
  static constexpr int kDegree = 7, kMantissa = 23, kBias = 127;
  static constexpr float kMin = -87.0f, kMax = 89.0f, kLeast = -88.0f;
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  // ln 2 in two parts; n times the first part is exact.
  static constexpr float kLn2High = 0.693145751953125f, kLn2Low = 1.42860682030941723e-6f;
};

template <>
struct ExpConstants<double> {
  typedef int64_t Int __attribute__((vector_size(KLA_VECTOR_BYTES)));
  static constexpr int kDegree = 13, kMantissa = 52, kBias = 1023;
  static constexpr double kMin = -708.4, kMax = 710.0, kLeast = -709.0;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLn2High = 0.693147180369123816490, kLn2Low = 1.90821492927058770002e-10;
};

template <class T>
constexpr T inverse_factorial(int n) {
  T product = 1;
  for (int i = 2; i <= n; ++i) product *= static_cast<T>(i);
  return T(1) / product;
}

template <class T, int Term>
struct ExpPolynomial {
  // sum_{i >= Term} r^(i - Term) / i!
  KLA_INLINE Vec<T> of(Vec<T> r) {
    if constexpr (Term == ExpConstants<T>::kDegree)
      return splat(inverse_factorial<T>(Term));
    else
      return ExpPolynomial<T, Term + 1>::of(r) * r + inverse_factorial<T>(Term);
  }
};

template <class T>
KLA_INLINE Vec<T> exp(Vec<T> x) {
  using C = ExpConstants<T>;
  using Int = typename C::Int;
  x = x < C::kMin ? splat(C::kMin) : x;
  x = x > C::kMax ? splat(C::kMax) : x;
  const Vec<T> shifted = x * T(1.44269504088896340736) + C::kRound;
  const Vec<T> n = shifted - C::kRound;
  const Vec<T> r = (x - n * C::kLn2High) - n * C::kLn2Low;
  // The low bits of `shifted` hold n. One factor of 2 is taken out so that n may be the largest
  // exponent plus one; the smallest n then gives an exponent of 0, which is the number 0.
  const Int exponent = (Int)shifted - (Int)splat(C::kRound) + (C::kBias - 1);
  const Vec<T> scale = (Vec<T>)(exponent << C::kMantissa);
  return (ExpPolynomial<T, 0>::of(r) * scale) * T(2);
}

KLA_INLINE Vec<float> silu(Vec<float> x) { return x / (1.0f + exp<float>(-x)); }

template <int Term>
KLA_INLINE Vec<float> odd_series(Vec<float> z2) {
  if constexpr (Term == 15) return splat(1.0f / Term);
  else return odd_series<Term + 2>(z2) * z2 + 1.0f / Term;
}

// max(x, 0) + log(1 + t) with t = e^-|x|. The logarithm is 2 atanh(z) with z = t / (2 + t), which is at most 1/3:
// eight terms of its series in z are exact to float32, also relative to a small t.
KLA_INLINE Vec<float> softplus(Vec<float> x) {
  const Vec<float> t = exp<float>(x > 0.0f ? -x : x), z = t / (2.0f + t);
  return (x > 0.0f ? x : Vec<float>{}) + 2.0f * z * odd_series<1>(z * z);
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
