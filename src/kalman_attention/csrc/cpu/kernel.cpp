// Compiled once per instruction set; KLA_ISA_NAMESPACE and KLA_VECTOR_BYTES come from the build.
#include "kernels.h"

#include "blocks.h"
#include "frames.h"
#include "kalman.h"
#include "linear.h"
#include "segments.h"
#include "smooth.h"
#include "smooth_backward.h"
#include "step.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {
namespace {

template <class T, int W>
Scan cut(const kla_scan_params& p) {
  return Scan(p, segments_of(p, W * kLanes<T>));
}

template <class M, class T, int W>
struct ForwardCall {
  static int run(const kla_scan_params& params) {
    const Scan p = cut<T, W>(params);
    return p.segments > 1 ? forward_segments<M, T, W>(p) : forward_rows<M, T, W>(p);
  }
};
template <class M, class T, int W>
struct BackwardCall {
  static int run(const kla_scan_params& params, const kla_scan_grads& g) {
    const Scan p = cut<T, W>(params);
    return p.segments > 1 ? backward_segments<M, T, W>(p, g) : Backward<M, T, W>(p, g).run();
  }
};
template <class M, class T, int W>
struct FilterMapCall {
  static int run(const kla_scan_params& p, void* maps) {
    return summarise_rows<M, T, W, ForwardDirection<T>>(Scan(p, 1), nullptr, maps);
  }
};
template <class M, class T, int W>
struct AdjointMapCall {
  static int run(const kla_scan_params& p, const kla_scan_grads& g, void* maps) {
    return summarise_rows<M, T, W, BackwardDirection<T>>(Scan(p, 1), &g, maps);
  }
};

template <class M, class T, int W>
struct SmoothCall {
  static int run(const kla_scan_params& p) {
    if constexpr (M::kHasVariance) return smooth_rows<M, T, W>(p);
    else return KLA_ERROR_ARGUMENT;
  }
};

template <class M, class T, int W>
struct SmoothBackwardCall {
  static int run(const kla_scan_params& p, const kla_scan_grads& g) {
    if constexpr (M::kHasVariance) return SmoothBackward<M::kGaps, T>(Scan(p, 1), g).run();
    else return KLA_ERROR_ARGUMENT;
  }
};

// Vectors per tile. Two hide the latency of the forward pass. With long vectors one is enough where exponentials are
// computed, whose constants occupy registers, and in the backward pass, whose trajectory would fill L2 with two: one
// vector took 26 ms instead of 32 at B=1 T=2048 D=960 N=16.
constexpr int kForwardWidth = 2, kBackwardWidth = KLA_VECTOR_BYTES == 64 ? 1 : 2;

template <class M, int WIDTH>
constexpr int kWidth = M::kGaps ? kBackwardWidth : WIDTH;

// With one or two slots, tiles of four vectors provide enough independent chains.
template <template <class, class, int> class Call, int WIDTH, class M, class T, class... Args>
int with_width(const kla_scan_params& p, const Args&... args) {
  if constexpr (M::kKnownSlots)
    if (p.N <= 2) return Call<M, T, 4>::run(p, args...);
  return Call<M, T, kWidth<M, WIDTH>>::run(p, args...);
}

template <template <class, class, int> class Call, int WIDTH, class T, class... Args>
int with_model(const kla_scan_params& p, const Args&... args) {
  if (p.model == KLA_MODEL_LINEAR) return with_width<Call, WIDTH, Linear, T>(p, args...);
  const bool gaps = p.dt.data != nullptr;
  if (p.G == p.N)
    return gaps ? with_width<Call, WIDTH, Kalman<true>, T>(p, args...)
                : with_width<Call, WIDTH, Kalman<false>, T>(p, args...);
  return gaps ? with_width<Call, WIDTH, Blocks<true>, T>(p, args...)
              : with_width<Call, WIDTH, Blocks<false>, T>(p, args...);
}

template <template <class, class, int> class Call, int WIDTH, class... Args>
int with_types(const kla_scan_params& p, const Args&... args) {
  return p.compute == KLA_FLOAT64 ? with_model<Call, WIDTH, double>(p, args...)
                                  : with_model<Call, WIDTH, float>(p, args...);
}

int forward(const kla_scan_params& p) {
  const bool one = p.T == 1 && p.cu_seqlens == nullptr && p.checkpoints == nullptr;
  if (one && p.model == KLA_MODEL_KALMAN)
    return p.compute == KLA_FLOAT64 ? run_step<double>(p) : run_step<float>(p);
  return with_types<ForwardCall, kForwardWidth>(p);
}

int backward(const kla_scan_params& p, const kla_scan_grads& g) {
  return with_types<BackwardCall, kBackwardWidth>(p, g);
}

int filter_map(const kla_scan_params& p, void* maps) { return with_types<FilterMapCall, kForwardWidth>(p, maps); }

int adjoint_map(const kla_scan_params& p, const kla_scan_grads& g, void* maps) {
  return with_types<AdjointMapCall, kForwardWidth>(p, g, maps);
}

int smooth(const kla_scan_params& p) { return with_types<SmoothCall, kBackwardWidth>(p); }

int smooth_backward(const kla_scan_params& p, const kla_scan_grads& g) {
  return with_types<SmoothBackwardCall, 1>(p, g);
}

}  // namespace

extern const Kernels kernels{forward,           backward,       smooth,         smooth_backward,  filter_map,
                             adjoint_map,       frames_forward, frames_backward, softplus_forward, softplus_backward,
                             norm_forward,      norm_backward,  memory_forward, memory_backward,  product,
                             layer_step};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
