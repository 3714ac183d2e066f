// SIMD vectors of KLA_VECTOR_BYTES through the compiler's vector extensions: one source for SSE, NEON,
// AVX2 and AVX-512. Everything lives in a namespace of its own per instruction set, so that the linker
// can never merge code that was compiled with different flags.
#ifndef KLA_CPU_VECTOR_H
#define KLA_CPU_VECTOR_H

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kla {
namespace KLA_ISA_NAMESPACE {

template <class T>
struct Simd;
template <>
struct Simd<float> {
  typedef float V __attribute__((vector_size(KLA_VECTOR_BYTES)));
};
template <>
struct Simd<double> {
  typedef double V __attribute__((vector_size(KLA_VECTOR_BYTES)));
};

template <class T>
using Vec = typename Simd<T>::V;

template <class T>
constexpr int kLanes = KLA_VECTOR_BYTES / static_cast<int>(sizeof(T));

#define KLA_ALWAYS __attribute__((always_inline))
#define KLA_METHOD inline KLA_ALWAYS
#define KLA_INLINE static KLA_METHOD

// Scratch arrays are aligned to a cache line and their rows are multiples of a vector.
template <class T>
KLA_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const Vec<T>*>(p);
}

template <class T>
KLA_INLINE void store(T* p, Vec<T> x) {
  *reinterpret_cast<Vec<T>*>(p) = x;
}

// Rows of a user's array start anywhere: memcpy becomes one unaligned move.
template <class V, class T>
KLA_INLINE V load_any(const T* p) {
  V x;
  memcpy(&x, p, sizeof(V));
  return x;
}

template <class V, class T>
KLA_INLINE void store_any(T* p, V x) {
  memcpy(p, &x, sizeof(V));
}

template <class T>
KLA_INLINE Vec<T> splat(T x) {
  return x - Vec<T>{};
}

// The larger of a bound and x; NaN in x stays. A comparison and a choice where there is no instruction for it.
template <class T>
KLA_INLINE Vec<T> at_least(T bound, Vec<T> x) {
#if KLA_VECTOR_BYTES == 64 && defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_maskz_max_ps(0xffff, splat(bound), x);
  else return _mm512_maskz_max_pd(0xff, splat(bound), x);
#elif KLA_VECTOR_BYTES == 32 && defined(__AVX2__)
  if constexpr (sizeof(T) == 4) return _mm256_max_ps(splat(bound), x);
  else return _mm256_max_pd(splat(bound), x);
#else
  return x < bound ? splat(bound) : x;
#endif
}

// Whether a lane is below a bound, or NaN.
template <class T>
KLA_INLINE bool any_below(Vec<T> x, T bound) {
#if KLA_VECTOR_BYTES == 64 && defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_cmp_ps_mask(x, splat(bound), _CMP_NGE_UQ);
  else return _mm512_cmp_pd_mask(x, splat(bound), _CMP_NGE_UQ);
#else
  bool any = false;
  for (int i = 0; i < kLanes<T>; ++i) any |= !(x[i] >= bound);
  return any;
#endif
}

// Output lane j of fold takes segment j / (S/2) of the concatenation (x, y), which is cut in segments
// of S lanes, and adds the two halves of that segment.
template <class T, int S, int... J>
KLA_INLINE Vec<T> fold(Vec<T> x, Vec<T> y, std::integer_sequence<int, J...>) {
  return __builtin_shufflevector(x, y, (J / (S / 2) * S + J % (S / 2))...) +
         __builtin_shufflevector(x, y, (J / (S / 2) * S + J % (S / 2) + S / 2)...);
}

// Count vectors, each cut in segments of S lanes: the lanes of the result are their segments in turn, each folded
// to S / Count values.
template <class T, int Count, int S = kLanes<T>>
struct RowSums {
  KLA_INLINE Vec<T> of(const T* x) {
    const auto low = RowSums<T, Count / 2, S>::of(x), high = RowSums<T, Count / 2, S>::of(x + Count / 2 * kLanes<T>);
    return fold<T, 2 * S / Count>(low, high, std::make_integer_sequence<int, kLanes<T>>{});
  }
};
template <class T, int S>
struct RowSums<T, 1, S> {
  KLA_INLINE Vec<T> of(const T* x) { return load(x); }
};

// sums[i] = sum of segment i of the vectors, which have F each, in a fixed tree order. There is room for a multiple
// of the lane count, in vectors and sums (pad with anything).
template <int F = 1, class T>
KLA_INLINE void row_sums(const T* vectors, int64_t count, T* sums) {
  constexpr int L = kLanes<T>, S = L / F;
  for (int64_t i = 0; i < count; i += L) store(sums + i, RowSums<T, S, S>::of(vectors + i * S));
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
