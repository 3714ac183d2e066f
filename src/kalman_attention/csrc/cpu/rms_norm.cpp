// The root-mean-square norm in one pass forward and one backward; compiled once per instruction set. As torch
// operations it is a dozen passes, most of them in the gradient.
#include <algorithm>
#include <cmath>
#include <vector>

#include "convert.h"
#include "kernels.h"
#include "parallel.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {
namespace {

// A task is a fixed number of rows, so that sums over rows have the same order for every thread count.
constexpr int64_t kRows = 64;
constexpr int L = kLanes<float>;

KLA_INLINE float sum_of(Vec<float> x) {
  float sum = 0;
  for (int i = 0; i < L; ++i) sum += x[i];
  return sum;
}

class Norm {
 public:
  explicit Norm(const kla_norm_params& params) : p(params) {}

  int64_t tasks() const { return (p.rows + kRows - 1) / kRows; }

  // Small tensors are not worth waking another thread; the limit is a guess.
  int64_t threads() const { return std::max<int64_t>(1, std::min(p.threads, p.rows * p.D / 100000)); }

  template <class S>
  void forward(const S* all, S* y, int64_t task) const {
    for (int64_t r = task * kRows; r < std::min(p.rows, (task + 1) * kRows); ++r) {
      const S* x = all + r * p.stride;
      const float rate = inverse_size(x);
      for (int64_t i = 0; i < p.D; i += L)
        store_lanes(load_lanes(x + i, p.D - i) * rate * gain(i), y + r * p.D + i, p.D - i);
    }
  }

  // dx of the rows of a task, and their sum of dy x / size, the gradient of the gain.
  template <class S>
  void backward(const S* all, const S* dys, S* dxs, int64_t task, float* sums) const {
    std::fill(sums, sums + p.D, 0.0f);
    for (int64_t r = task * kRows; r < std::min(p.rows, (task + 1) * kRows); ++r) {
      const S *x = all + r * p.stride, *dy = dys + r * p.D;
      const float rate = inverse_size(x);
      Vec<float> along = {};
      for (int64_t i = 0; i < p.D; i += L)
        along += load_lanes(x + i, p.D - i) * load_lanes(dy + i, p.D - i) * gain(i);
      const float back = sum_of(along) * rate * rate / static_cast<float>(p.D);
      for (int64_t i = 0; i < p.D; i += L) {
        const int64_t left = p.D - i;
        const Vec<float> here = load_lanes(x + i, left), d = load_lanes(dy + i, left) * rate;
        store_lanes(d * gain(i) - here * (back * rate), dxs + r * p.D + i, left);
        store_lanes(load_lanes(sums + i, left) + d * here, sums + i, left);
      }
    }
  }

 private:
  const kla_norm_params& p;

  template <class S>
  KLA_METHOD float inverse_size(const S* x) const {
    Vec<float> squares = {};
    for (int64_t i = 0; i < p.D; i += L) {
      const Vec<float> here = load_lanes(x + i, p.D - i);
      squares += here * here;
    }
    return 1.0f / std::sqrt(sum_of(squares) / static_cast<float>(p.D) + static_cast<float>(p.eps));
  }

  KLA_METHOD Vec<float> gain(int64_t i) const {
    return p.weight == nullptr ? splat(1.0f) : load_lanes(p.weight + i, p.D - i);
  }
};

template <class S>
void run_forward(const kla_norm_params& p) {
  const Norm norm(p);
  auto walk = [&](int64_t task, int) { norm.forward(static_cast<const S*>(p.x), static_cast<S*>(p.y), task); };
  parallel_for(norm.threads(), KLA_POOL_AUTO, norm.tasks(), walk);
}

template <class S>
void run_backward(const kla_norm_params& p, const kla_norm_grads& g) {
  const Norm norm(p);
  const S *x = static_cast<const S*>(p.x), *dy = static_cast<const S*>(g.dy);
  S* dx = static_cast<S*>(g.dx);
  auto walk = [&](int64_t task, float* sums) { norm.backward(x, dy, dx, task, sums); };
  const std::vector<float> sums = parallel_sums(norm.threads(), KLA_POOL_AUTO, norm.tasks(), p.D, walk);
  if (g.dweight != nullptr) std::copy(sums.begin(), sums.end(), g.dweight);
}

}  // namespace

int norm_forward(const kla_norm_params& p) {
  p.dtype == KLA_BFLOAT16 ? run_forward<BFloat>(p) : run_forward<float>(p);
  return KLA_OK;
}

int norm_backward(const kla_norm_params& p, const kla_norm_grads& g) {
  p.dtype == KLA_BFLOAT16 ? run_backward<BFloat>(p, g) : run_backward<float>(p, g);
  return KLA_OK;
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
