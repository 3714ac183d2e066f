// Compiled once per instruction set; KLA_ISA_NAMESPACE and KLA_VECTOR_BYTES come from the build.
#include "kernels.h"

#include "kalman.h"
#include "linear.h"
#include "segments.h"
#include "step.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {
namespace {

template <class M, class T, int W>
struct ForwardCall {
  static int run(const Scan& p) {
    return p.segments > 1 ? forward_segments<M, T, W>(p) : forward_rows<M, T, W>(p);
  }
};
template <class M, class T, int W>
struct BackwardCall {
  static int run(const Scan& p, const kla_scan_grads& g) {
    return p.segments > 1 ? backward_segments<M, T, W>(p, g) : Backward<M, T, W>(p, g).run();
  }
};

template <template <class, class, int> class Call, class M, class T, int W, class... Args>
int with_segments(const kla_scan_params& p, const Args&... args) {
  return Call<M, T, W>::run(Scan(p, segments_of(p, W * kLanes<T>)), args...);
}

// Few slots need wide tiles to have enough independent chains.
template <template <class, class, int> class Call, class M, class T, class... Args>
int with_width(const kla_scan_params& p, const Args&... args) {
  if (p.N <= 2) return with_segments<Call, M, T, 4>(p, args...);
  return with_segments<Call, M, T, 2>(p, args...);
}

template <template <class, class, int> class Call, class... Args>
int with_types(const kla_scan_params& p, const Args&... args) {
  const bool kalman = p.model == KLA_MODEL_KALMAN;
  if (p.compute == KLA_FLOAT64)
    return kalman ? with_width<Call, Kalman, double>(p, args...)
                  : with_width<Call, Linear, double>(p, args...);
  return kalman ? with_width<Call, Kalman, float>(p, args...)
                : with_width<Call, Linear, float>(p, args...);
}

int forward(const kla_scan_params& p) {
  const bool one = p.T == 1 && p.cu_seqlens == nullptr && p.checkpoints == nullptr;
  if (one && p.model == KLA_MODEL_KALMAN)
    return p.compute == KLA_FLOAT64 ? run_step<double>(p) : run_step<float>(p);
  return with_types<ForwardCall>(p);
}

int backward(const kla_scan_params& p, const kla_scan_grads& g) {
  return with_types<BackwardCall>(p, g);
}

}  // namespace

extern const Kernels kernels{forward, backward};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
