// Products of a few rows with a matrix, for decoding. The matrix lies as nn.Linear stores it, so an output is a dot
// product with a row of it: every weight is read once, in the order of the memory, which is all that takes time.
#ifndef KLA_CPU_PRODUCT_H
#define KLA_CPU_PRODUCT_H

#include <algorithm>
#include <type_traits>

#include "../kla_decode.h"
#include "convert.h"
#include "parallel.h"
#include "plan.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

KLA_INLINE Vec<float> load_weights(const float* p) { return load_any<Vec<float>>(p); }

KLA_INLINE Vec<float> load_weights(const BFloat* p) {
  typedef uint16_t Short __attribute__((vector_size(KLA_VECTOR_BYTES / 2)));
  typedef uint32_t Word __attribute__((vector_size(KLA_VECTOR_BYTES)));
  return (Vec<float>)(__builtin_convertvector(load_any<Short>(p), Word) << 16);
}

// The products of a row of weights with R vectors of n numbers, `stride` apart, before the lanes are summed.
template <int R, class W>
KLA_INLINE void dot_lanes(const W* row, const float* x, int64_t n, int64_t stride, Vec<float>* sums) {
  constexpr int L = kLanes<float>, kChains = R > 1 ? 2 : 4;  // independent sums, as many as there are registers for
  Vec<float> chains[R][kChains] = {};
  int64_t i = 0;
  for (; i + kChains * L <= n; i += kChains * L)
    for (int c = 0; c < kChains; ++c) {
      const Vec<float> w = load_weights(row + i + c * L);
      for (int r = 0; r < R; ++r) chains[r][c] += w * load_any<Vec<float>>(x + r * stride + i + c * L);
    }
  for (; i + L <= n; i += L) {
    const Vec<float> w = load_weights(row + i);
    for (int r = 0; r < R; ++r) chains[r][0] += w * load_any<Vec<float>>(x + r * stride + i);
  }
  for (int r = 0; r < R; ++r) {
    sums[r] = chains[r][0];
    for (int c = 1; c < kChains; ++c) sums[r] += chains[r][c];
    for (int64_t j = i; j < n; ++j) sums[r][j - i] += decode(row[j]) * x[r * stride + j];
  }
}

// A matrix of weights of type W, and how a product with it is cut into tasks: by its shape alone.
template <class W>
struct Matrix {
  const W *weight, *bias;
  int64_t out, in, rows, tasks;

  explicit Matrix(const kla_matrix& m)
      : weight(static_cast<const W*>(m.weight)), bias(static_cast<const W*>(m.bias)), out(m.out), in(m.in) {
    constexpr int64_t L = kLanes<float>, kTaskBytes = 64 * 1024;
    const int64_t row_bytes = std::max<int64_t>(1, in * static_cast<int64_t>(sizeof(W)));
    rows = std::max<int64_t>(1, kTaskBytes / row_bytes / L) * L;
    tasks = (out + rows - 1) / rows;
  }

  // Outputs [o, o + count) of all rows, count at most one vector: sink(r, o, count, outputs).
  template <int R, class Sink>
  KLA_METHOD void block(const float* x, int64_t stride, int64_t o, int64_t count, Sink& sink) const {
    constexpr int L = kLanes<float>;
    Vec<float> lanes[R][L] = {};
    for (int64_t j = 0; j < count; ++j) {
      Vec<float> sums[R];
      dot_lanes<R>(weight + (o + j) * in, x, in, stride, sums);
      for (int r = 0; r < R; ++r) lanes[r][j] = sums[r];
    }
    for (int r = 0; r < R; ++r) {
      alignas(KLA_VECTOR_BYTES) float y[L];
      row_sums(reinterpret_cast<const float*>(lanes[r]), L, y);
      for (int64_t j = 0; bias != nullptr && j < count; ++j) y[j] += decode(bias[o + j]);
      sink(r, o, count, y);
    }
  }

  template <int R, class Sink>
  void multiply_rows(const float* x, int64_t stride, int64_t threads, Sink& sink) const {
    constexpr int64_t L = kLanes<float>;
    auto task = [&](int64_t t, int) {
      const int64_t end = std::min(out, (t + 1) * rows);
      for (int64_t o = t * rows; o < end; o += L) block<R>(x, stride, o, std::min(L, end - o), sink);
    };
    parallel_for(threads, KLA_POOL_AUTO, tasks, task);
  }

  // The product with R vectors, `stride` apart; what comes out is handed to sink, from several threads.
  template <class Sink>
  void multiply(int64_t R, const float* x, int64_t stride, int64_t threads, Sink sink) const {
    static_assert(KLA_FEW_ROWS == 4, "a case for each number of rows");
    switch (R) {
      case 1: return multiply_rows<1>(x, stride, threads, sink);
      case 2: return multiply_rows<2>(x, stride, threads, sink);
      case 3: return multiply_rows<3>(x, stride, threads, sink);
      default: return multiply_rows<4>(x, stride, threads, sink);
    }
  }
};

template <class S>
int run_product(const kla_product_params& p) {
  const Matrix<S> matrix(p.matrix);
  const Block block(static_cast<size_t>(p.R * matrix.in) * sizeof(float));
  if (!block) return KLA_ERROR_MEMORY;
  float* x = reinterpret_cast<float*>(block.data());
  decode_row(static_cast<const S*>(p.x), p.R * matrix.in, p.R * matrix.in, x);
  S* y = static_cast<S*>(p.y);
  matrix.multiply(p.R, x, matrix.in, p.threads, [&](int64_t r, int64_t o, int64_t count, const float* from) {
    encode_row(from, count, y + r * matrix.out + o);
  });
  return KLA_OK;
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
