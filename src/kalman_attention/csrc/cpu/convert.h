// Rows of numbers in any of the four dtypes, to and from the compute type. Bit arithmetic instead of
// F16C: it vectorises everywhere and does not care that denormals are flushed in the workers.
#ifndef KLA_CPU_CONVERT_H
#define KLA_CPU_CONVERT_H

#include <cstdint>
#include <cstring>

#include "../kla_scan.h"
#include "vector.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

KLA_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

KLA_INLINE float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

struct Half {
  uint16_t bits;

  KLA_INLINE float decode(Half h) {
    uint32_t magnitude = h.bits & 0x7fffu;
    uint32_t sign = (h.bits & 0x8000u) << 16;
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t special = (magnitude << 13) | 0x7f800000u;
    // Denormal half m * 2^-24: put m in the mantissa of 2^-14 and take 2^-14 away again.
    uint32_t tiny = bits_of(float_of(0x38800000u | (magnitude << 13)) - float_of(0x38800000u));
    uint32_t u = magnitude < 0x0400u ? tiny : normal;
    return float_of(sign | (magnitude >= 0x7c00u ? special : u));
  }

  KLA_INLINE Half encode(float x) {
    uint32_t u = bits_of(x) & 0x7fffffffu;
    uint32_t sign = (bits_of(x) >> 16) & 0x8000u;
    uint32_t normal = (u + 0xc8000fffu + ((u >> 13) & 1u)) >> 13;
    // Adding 0.5 rounds to a multiple of 2^-24, the step of denormal halves.
    uint32_t tiny = bits_of(float_of(u) + 0.5f) - bits_of(0.5f);
    uint32_t special = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t h = u < 0x38800000u ? tiny : normal;
    return {static_cast<uint16_t>(sign | (u >= 0x47800000u ? special : h))};
  }
};

struct BFloat {
  uint16_t bits;

  KLA_INLINE float decode(BFloat h) { return float_of(static_cast<uint32_t>(h.bits) << 16); }

  KLA_INLINE BFloat encode(float x) {
    uint32_t u = bits_of(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    return {static_cast<uint16_t>(nan ? (u >> 16) | 0x40u : rounded)};
  }
};

KLA_INLINE float decode(float x) { return x; }
KLA_INLINE double decode(double x) { return x; }
KLA_INLINE float decode(Half x) { return Half::decode(x); }
KLA_INLINE float decode(BFloat x) { return BFloat::decode(x); }
template <class T>
KLA_INLINE void encode(T x, float* out) { *out = static_cast<float>(x); }
template <class T>
KLA_INLINE void encode(T x, double* out) { *out = x; }
template <class T>
KLA_INLINE void encode(T x, Half* out) { *out = Half::encode(static_cast<float>(x)); }
template <class T>
KLA_INLINE void encode(T x, BFloat* out) { *out = BFloat::encode(static_cast<float>(x)); }

// Calls f with data as a pointer of its type.
template <class F>
KLA_INLINE void with_type(void* data, int64_t dtype, F f) {
  switch (dtype) {
    case KLA_FLOAT32: return f(static_cast<float*>(data));
    case KLA_FLOAT64: return f(static_cast<double*>(data));
    case KLA_FLOAT16: return f(static_cast<Half*>(data));
    default: return f(static_cast<BFloat*>(data));
  }
}
template <class F>
KLA_INLINE void with_type(const void* data, int64_t dtype, F f) {
  with_type(const_cast<void*>(data), dtype, [=](const auto* x) { f(x); });
}

// dst[0..count) = src, dst[count..padded) = 0. Whole blocks have a constant length and vectorise without
// prologue or tail.
template <class T, class S>
KLA_INLINE void decode_row(const S* src, int64_t count, int64_t padded, T* dst) {
  constexpr int kBlock = 16;
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock)
    for (int u = 0; u < kBlock; ++u) dst[i + u] = static_cast<T>(decode(src[i + u]));
  for (; i < count; ++i) dst[i] = static_cast<T>(decode(src[i]));
  for (; i < padded; ++i) dst[i] = 0;
}

template <class T, class S>
KLA_INLINE void encode_row(const T* src, int64_t count, S* dst) {
  constexpr int kBlock = 16;
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock)
    for (int u = 0; u < kBlock; ++u) encode(src[i + u], dst + i + u);
  for (; i < count; ++i) encode(src[i], dst + i);
}

// A vector of entries of a row, or the `count` that are left of it, followed by zeros.
KLA_INLINE Vec<float> load_lanes(const float* x, int64_t count) {
  if (count >= kLanes<float>) return load_any<Vec<float>>(x);
  Vec<float> lanes = {};
  memcpy(&lanes, x, static_cast<size_t>(count) * sizeof(float));
  return lanes;
}

typedef uint16_t Shorts __attribute__((vector_size(KLA_VECTOR_BYTES / 2)));
typedef uint32_t Words __attribute__((vector_size(KLA_VECTOR_BYTES)));

KLA_INLINE Vec<float> load_lanes(const BFloat* x, int64_t count) {
  Shorts shorts = {};
  if (count >= kLanes<float>) shorts = load_any<Shorts>(x);
  else memcpy(&shorts, x, static_cast<size_t>(count) * sizeof(BFloat));
  return (Vec<float>)(__builtin_convertvector(shorts, Words) << 16);
}

KLA_INLINE void store_lanes(Vec<float> x, float* to, int64_t count) {
  if (count >= kLanes<float>) store_any(to, x);
  else memcpy(to, &x, static_cast<size_t>(count) * sizeof(float));
}

// To the nearest bfloat16, ties to even, as BFloat::encode.
KLA_INLINE void store_lanes(Vec<float> x, BFloat* to, int64_t count) {
  const Words bits = (Words)x, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const auto nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const Shorts shorts = __builtin_convertvector(nan ? (bits >> 16) | 0x40u : rounded, Shorts);
  if (count >= kLanes<float>) store_any(to, shorts);
  else memcpy(to, &shorts, static_cast<size_t>(count) * sizeof(BFloat));
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
