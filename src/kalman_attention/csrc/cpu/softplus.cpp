// softplus and its reciprocal, with bias and conversion, in one pass forward and one backward; compiled once per
// instruction set. In torch operations the exponential and the logarithm are two passes, and every step of the link
// of a precision is another.
#include <algorithm>
#include <vector>

#include "convert.h"
#include "exp.h"
#include "kernels.h"
#include "parallel.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {
namespace {

// A task is a fixed number of rows, so that sums over rows have the same order for every thread count.
constexpr int64_t kRows = 64;
constexpr int L = kLanes<float>;

class Softplus {
 public:
  explicit Softplus(const kla_softplus_params& params)
      : p(params), floor(static_cast<float>(params.floor)), scale(static_cast<float>(params.scale)) {}

  int64_t tasks() const { return (p.rows + kRows - 1) / kRows; }

  // Small tensors are not worth waking another thread; the limit is a guess.
  int64_t threads() const { return std::max<int64_t>(1, std::min(p.threads, p.rows * p.D / 50000)); }

  template <class S>
  void forward(const S* x, int64_t task) const {
    for (int64_t r = task * kRows; r < std::min(p.rows, (task + 1) * kRows); ++r)
      for (int64_t i = 0; i < p.D; i += L) {
        const Vec<float> y = softplus(input(x, r, i)) + floor;
        store_lanes(p.inverse ? scale / y : scale * y, p.y + r * p.D + i, p.D - i);
      }
  }

  // dx of the rows of a task, and their sum over rows.
  template <class S>
  void backward(const kla_softplus_grads& g, const S* x, S* dx, int64_t task, float* sums) const {
    const float outer = p.inverse ? -1.0f / scale : scale;  // y = scale / s has the derivative -y^2 / scale in s
    std::fill(sums, sums + p.D, 0.0f);
    for (int64_t r = task * kRows; r < std::min(p.rows, (task + 1) * kRows); ++r)
      for (int64_t i = 0; i < p.D; i += L) {
        const int64_t at = r * p.D + i, left = p.D - i;
        Vec<float> d = load_lanes(g.dy + at, left) * outer;
        if (p.inverse) {
          const Vec<float> y = load_lanes(p.y + at, left);
          d *= y * y;
        }
        d /= 1.0f + exp<float>(-input(x, r, i));
        store_lanes(d, dx + at, left);
        store_lanes(load_lanes(sums + i, left) + d, sums + i, left);
      }
  }

 private:
  const kla_softplus_params& p;
  const float floor, scale;

  template <class S>
  KLA_METHOD Vec<float> input(const S* x, int64_t r, int64_t i) const {
    const Vec<float> found = load_lanes(x + r * p.stride + i, p.D - i);
    return p.bias == nullptr ? found : found + load_lanes(p.bias + i, p.D - i);
  }
};

template <class S>
void run_backward(const kla_softplus_params& p, const kla_softplus_grads& g) {
  const Softplus link(p);
  const S* x = static_cast<const S*>(p.x);
  S* dx = static_cast<S*>(g.dx);
  auto walk = [&](int64_t task, float* sums) { link.backward(g, x, dx, task, sums); };
  const std::vector<float> sums = parallel_sums(link.threads(), KLA_POOL_AUTO, link.tasks(), p.D, walk);
  if (g.dbias != nullptr) std::copy(sums.begin(), sums.end(), g.dbias);
}

}  // namespace

int softplus_forward(const kla_softplus_params& p) {
  const Softplus link(p);
  auto run = [&](const auto* x) {
    auto walk = [&](int64_t task, int) { link.forward(x, task); };
    parallel_for(link.threads(), KLA_POOL_AUTO, link.tasks(), walk);
  };
  if (p.dtype == KLA_BFLOAT16) run(static_cast<const BFloat*>(p.x));
  else run(static_cast<const float*>(p.x));
  return KLA_OK;
}

int softplus_backward(const kla_softplus_params& p, const kla_softplus_grads& g) {
  p.dtype == KLA_BFLOAT16 ? run_backward<BFloat>(p, g) : run_backward<float>(p, g);
  return KLA_OK;
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
