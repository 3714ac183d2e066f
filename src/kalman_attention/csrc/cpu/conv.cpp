// The short causal convolution of a layer: one pass over the tokens forward, one backward. In torch operations every
// tap is a separate pass, and each waits for memory if the sequence does not fit into a cache. Float32, vectorised by
// the compiler: memory is the limit.
#include <algorithm>
#include <cstddef>
#include <exception>
#include <new>
#include <vector>

#include "../kla_scan.h"
#include "parallel.h"

namespace kla {
namespace {

// A task is a piece of time of one row, so that sums over time have the same order for every thread count. Within it
// channels are processed in blocks whose taps and rows stay in L1: 512 channels of 4 taps and 4 rows are 16 KB.
constexpr int64_t kTokens = 256, kChannels = 512;

struct Piece {
  int64_t b, begin, end;
};

class Conv {
 public:
  explicit Conv(const kla_conv_params& params) : p(params), blocks((params.T + kTokens - 1) / kTokens) {}

  int64_t tasks() const { return p.B * blocks; }

  // With less work than 500,000 operations a second thread costs more than it gains.
  int64_t threads() const {
    const double work = static_cast<double>(p.B) * static_cast<double>(p.T * p.D * p.K) / 500000;
    return std::max<int64_t>(1, work < static_cast<double>(p.threads) ? static_cast<int64_t>(work) : p.threads);
  }

  Piece piece(int64_t task) const {
    const int64_t begin = task % blocks * kTokens;
    return {task / blocks, begin, std::min(p.T, begin + kTokens)};
  }

  void forward(int64_t task) const {
    const Piece s = piece(task);
    for (int64_t d0 = 0; d0 < p.D; d0 += kChannels)
      for (int64_t t = s.begin; t < s.end; ++t) {
        const int64_t count = std::min(kChannels, p.D - d0);
        float* y = p.y + (s.b * p.T + t) * p.D + d0;
        scale(p.bias + d0, weight(p.K - 1) + d0, token(s.b, t) + d0, count, y);
        for (int64_t j = p.K - 2; j >= 0; --j)
          add_product(weight(j) + d0, token(s.b, t - p.K + 1 + j) + d0, count, y);
      }
  }

  // dx, and the sums of this piece over time: dweight [K, D], then dbias [D].
  void backward(const kla_conv_grads& g, int64_t task, float* sums) const {
    const Piece s = piece(task);
    std::fill(sums, sums + (p.K + 1) * p.D, 0.0f);
    for (int64_t d0 = 0; d0 < p.D; d0 += kChannels)
      for (int64_t t = s.begin; t < s.end; ++t) {
        const int64_t count = std::min(kChannels, p.D - d0);
        const auto dy = [&](int64_t at) { return g.dy + s.b * g.stride_b + at * g.stride_t + d0; };
        float* dx = g.dx + (s.b * p.T + t) * p.D + d0;
        std::fill(dx, dx + count, 0.0f);
        for (int64_t back = 0; back < std::min(p.K, p.T - t); ++back)
          add_product(weight(p.K - 1 - back) + d0, dy(t + back), count, dx);
        for (int64_t j = 0; j < p.K; ++j)
          add_product(dy(t), token(s.b, t - p.K + 1 + j) + d0, count, sums + j * p.D + d0);
        add(dy(t), count, sums + p.K * p.D + d0);
      }
  }

  // The window is the K - 1 tokens before the first; its gradient comes from the tokens that it reaches.
  void window_gradient(const kla_conv_grads& g, int64_t b) const {
    float* dwindow = g.dwindow + b * (p.K - 1) * p.D;
    std::fill(dwindow, dwindow + (p.K - 1) * p.D, 0.0f);
    for (int64_t i = 0; i < p.K - 1; ++i)
      for (int64_t t = 0; t <= std::min(i, p.T - 1); ++t)
        add_product(weight(i - t), g.dy + b * g.stride_b + t * g.stride_t, p.D, dwindow + i * p.D);
  }

 private:
  const kla_conv_params& p;
  const int64_t blocks;

  const float* weight(int64_t j) const { return p.weight + j * p.D; }

  const float* token(int64_t b, int64_t t) const {
    return t >= 0 ? p.x + b * p.stride_b + t * p.stride_t : p.window + ((b + 1) * (p.K - 1) + t) * p.D;
  }

  static void scale(const float* offset, const float* w, const float* x, int64_t count,
                    float* __restrict y) {
    for (int64_t i = 0; i < count; ++i) y[i] = offset[i] + w[i] * x[i];
  }

  static void add_product(const float* w, const float* x, int64_t count, float* __restrict y) {
    for (int64_t i = 0; i < count; ++i) y[i] += w[i] * x[i];
  }

  static void add(const float* x, int64_t count, float* __restrict y) {
    for (int64_t i = 0; i < count; ++i) y[i] += x[i];
  }
};

int check(const kla_conv_params* p) {
  if (p == nullptr || p->abi != KLA_ABI_VERSION) return KLA_ERROR_ABI;
  const bool sizes = p->B >= 0 && p->T >= 0 && p->D >= 1 && p->K >= 1 && p->threads >= 1;
  return sizes ? KLA_OK : KLA_ERROR_ARGUMENT;
}

void run_backward(const kla_conv_params& p, const kla_conv_grads& g) {
  const Conv conv(p);
  const int64_t size = (p.K + 1) * p.D;
  auto walk = [&](int64_t task, float* sums) { conv.backward(g, task, sums); };
  const std::vector<float> sums = parallel_sums(conv.threads(), KLA_POOL_AUTO, conv.tasks(), size, walk);
  for (int64_t b = 0; b < p.B; ++b) conv.window_gradient(g, b);
  std::copy(sums.begin(), sums.end() - p.D, g.dweight);
  std::copy(sums.end() - p.D, sums.end(), g.dbias);
}

}  // namespace
}  // namespace kla

int kla_conv_forward(const kla_conv_params* params) {
  if (const int status = kla::check(params)) return status;
  const kla::Conv conv(*params);
  auto walk = [&](int64_t task, int) { conv.forward(task); };
  kla::parallel_for(conv.threads(), KLA_POOL_AUTO, conv.tasks(), walk);
  return KLA_OK;
}

int kla_conv_backward(const kla_conv_params* params, const kla_conv_grads* grads) {
  if (grads == nullptr) return KLA_ERROR_ARGUMENT;
  if (const int status = kla::check(params)) return status;
  try {
    kla::run_backward(*params, *grads);
  } catch (const std::bad_alloc&) {
    return KLA_ERROR_MEMORY;
  }
  return KLA_OK;
}
