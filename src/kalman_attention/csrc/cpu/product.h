// Products of a few rows with a matrix, for decoding. The matrix is stored as by nn.Linear, so an output is a dot
// product with one of its rows: every weight is read once, in memory order, which is what takes the time.
#ifndef KLA_CPU_PRODUCT_H
#define KLA_CPU_PRODUCT_H

#include <algorithm>

#include "../kla_decode.h"
#include "convert.h"
#include "parallel.h"
#include "plan.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

// Memory delivers more if it is read at several places at once: this is the number of pieces of a matrix that are
// processed together. Their rows must be pages apart; adjacent rows would be slower than one row at a time. More
// rows of x need more registers for sums, hence fewer places.
template <int R>
constexpr int kPlaces = R == 1 ? 4 : 2;

// Rows of weights, one at each place, times R vectors of n numbers, `stride` apart, before lanes are summed.
template <int R, class W>
KLA_INLINE void dot_lanes(const W* const (&rows)[kPlaces<R>], const float* x, int64_t n, int64_t stride,
                          Vec<float> (&sums)[kPlaces<R>][R]) {
  constexpr int L = kLanes<float>, P = kPlaces<R>;
  for (int g = 0; g < P; ++g)
    for (int r = 0; r < R; ++r) sums[g][r] = Vec<float>{};
  int64_t i = 0;
  for (; i + L <= n; i += L)
    for (int g = 0; g < P; ++g) {
      const Vec<float> w = load_lanes(rows[g] + i, L);
      for (int r = 0; r < R; ++r) sums[g][r] += w * load_any<Vec<float>>(x + r * stride + i);
    }
  for (int64_t j = i; j < n; ++j)
    for (int g = 0; g < P; ++g)
      for (int r = 0; r < R; ++r) sums[g][r][j - i] += decode(rows[g][j]) * x[r * stride + j];
}

// A matrix of weights of type W, and how a product with it is divided into tasks: by its shape alone.
template <class W>
struct Matrix {
  const W *weight, *bias;
  int64_t out, in;

  explicit Matrix(const kla_matrix& m)
      : weight(static_cast<const W*>(m.weight)), bias(static_cast<const W*>(m.bias)), out(m.out), in(m.in) {}

  // Outputs [begin, end) of each of the pieces of the matrix, `apart` rows long.
  template <int R, class Sink>
  void task(const float* x, int64_t stride, int64_t apart, int64_t begin, int64_t end, Sink& sink) const {
    constexpr int L = kLanes<float>, P = kPlaces<R>;
    for (int64_t o = begin; o < end; o += L) {
      Vec<float> lanes[P][R][L];
      const int64_t count = std::min<int64_t>(L, end - o);
      for (int64_t j = 0; j < L; ++j) {
        const W* at[P];
        Vec<float> sums[P][R] = {};
        // The last piece may be shorter: repeat its last row, whose result is not used.
        for (int g = 0; g < P; ++g) at[g] = weight + std::min(o + j + g * apart, out - 1) * in;
        if (j < count) dot_lanes<R>(at, x, in, stride, sums);
        for (int g = 0; g < P; ++g)
          for (int r = 0; r < R; ++r) lanes[g][r][j] = sums[g][r];
      }
      for (int g = 0; g < P; ++g)
        for (int r = 0; r < R; ++r)
          emit(r, o + g * apart, std::min(count, out - (o + g * apart)), lanes[g][r], sink);
    }
  }

  template <class Sink>
  KLA_METHOD void emit(int64_t r, int64_t o, int64_t count, const Vec<float>* lanes, Sink& sink) const {
    if (count <= 0) return;
    alignas(KLA_VECTOR_BYTES) float y[kLanes<float>];
    row_sums(reinterpret_cast<const float*>(lanes), kLanes<float>, y);
    for (int64_t j = 0; bias != nullptr && j < count; ++j) y[j] += decode(bias[o + j]);
    sink(r, o, count, y);
  }

  template <int R, class Sink>
  void multiply_rows(const float* x, int64_t stride, int64_t threads, Sink& sink) const {
    constexpr int64_t kTaskBytes = 128 * 1024;  // some 6 us at 20 GB/s: many times the cost of starting a task
    const int64_t apart = (out + kPlaces<R> - 1) / kPlaces<R>, bytes = out * in * static_cast<int64_t>(sizeof(W));
    const int64_t tasks = std::max<int64_t>(1, std::min(apart, (bytes + kTaskBytes / 2) / kTaskBytes));
    const int64_t rows = (apart + tasks - 1) / tasks;
    auto run = [&](int64_t t, int) { task<R>(x, stride, apart, t * rows, std::min(apart, (t + 1) * rows), sink); };
    parallel_for(threads, KLA_POOL_AUTO, tasks, run);
  }

  // The product with R vectors, `stride` apart; results are passed to sink, from several threads.
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
