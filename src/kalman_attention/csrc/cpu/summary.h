// The summary of a segment of tokens, continued over one staged chunk and one tile (segment.h): the numbers that
// allow time to be split. One loop for slots with and without a shared variance, because few calls need it.
#ifndef KLA_CPU_SUMMARY_H
#define KLA_CPU_SUMMARY_H

#include "../segment.h"
#include "gaps.h"
#include "stage.h"
#include "tile.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

// The tokens of one chunk and the gradients of their outputs.
template <class T>
struct SummaryRows {
  Rows<const T> v, lam_v, dt, dy, dy_var;
};

template <bool GAPS>
struct Summary {
  using Maps = Summary;  // what Segments asks for: the same for all models that inherit it
  static constexpr bool kHasVariance = true;

  // Calls f(block fields, slot fields of its first slot, dynamics, lam_v, lam_v v, token, block, channel).
  template <class T, int W, class F>
  static void each_block(const Stage<T>& in, const SummaryRows<T>& rows, const Tiles<T, W>& state, int64_t d, F f) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L;
    for (int64_t j = 0; j < in.count; ++j)
      for (int64_t g = 0; g < in.G; ++g)
        for (int w = 0; w < W; ++w) {
          const int64_t at = d + w * L;
          T* lane = state.block(d, g) + w * L;
          const V lam_v = load_any<V>(rows.lam_v.at(j, at));
          const V lv = information<V>(load_any<V>(rows.v.at(j, at)), lam_v);
          const auto to = dynamics<GAPS, T, X>(lane, GAPS ? load_any<V>(rows.dt.at(j, at)) : V{});
          f(lane, lane + kSummaryBlock * X, to, lam_v, lv, j, g, at);
        }
  }

  template <class T, int W>
  static void filter_map(const Stage<T>& in, const SummaryRows<T>& rows, const Tiles<T, W>& state, int64_t d) {
    using V = Vec<T>;
    constexpr int X = W * kLanes<T>;
    const int64_t m = state.m;
    each_block<T, W>(in, rows, state, d, [&](T* lane, T* slot, const auto& to, V lam_v, V lv, int64_t j, int64_t g, int64_t) {
      const V phi = in.k2[j * in.G + g] * lam_v;
      const auto next = filter_block<V>(to, phi, lv, load(lane + kS * X));
      const V before = to.a * load(lane + kGain * X), gain = next.r * before;
      const T* k = in.k + j * in.N + g * m;
      for (int64_t n = 0; n < m; ++n, slot += kSummarySlot * X) {
        const V mu = load(slot + kMu * X), e = innovation<V>(phi, k[n] * lv, to.a * mu);
        store(slot + kMu * X, next.keep * mu + k[n] * next.gain);
        store(slot + kEta * X, load(slot + kEta * X) + gain * e);
      }
      store(lane + kS * X, next.s);
      store(lane + kGain * X, gain);
      store(lane + kJ * X, load(lane + kJ * X) + (phi * before) * gain);
    });
  }

  // The filter goes along with it.
  template <class T, int W>
  static void adjoint_map(const Stage<T>& in, const SummaryRows<T>& rows, const Tiles<T, W>& state, int64_t d) {
    using V = Vec<T>;
    constexpr int X = W * kLanes<T>;
    const int64_t m = state.m;
    each_block<T, W>(in, rows, state, d, [&](T* lane, T* slot, const auto& to, V lam_v, V lv, int64_t j, int64_t g, int64_t at) {
      const V phi = in.k2[j * in.G + g] * lam_v, dy = load_any<V>(rows.dy.at(j, at));
      const auto next = filter_block<V>(to, phi, lv, load(lane + kS * X));
      const V gain = next.keep * load(lane + kGain * X);
      V ds_0 = load(lane + kDs0 * X) + gain * (gain * (in.q2[j * in.G + g] * load_any<V>(rows.dy_var.at(j, at))));
      const T *k = in.k + j * in.N + g * m, *q = in.q + j * in.N + g * m;
      for (int64_t n = 0; n < m; ++n, slot += kSummarySlot * X) {
        const V mu = load(slot + kMu * X), e = innovation<V>(phi, k[n] * lv, to.a * mu);
        const V cross = next.keep * load(slot + kCross * X) + gain * (gain * e), dmu = q[n] * dy;
        ds_0 += cross * dmu;
        store(slot + kMu * X, next.keep * mu + k[n] * next.gain);
        store(slot + kCross * X, cross);
        store(slot + kDmu0 * X, load(slot + kDmu0 * X) + gain * dmu);
      }
      store(lane + kS * X, next.s);
      store(lane + kGain * X, gain);
      store(lane + kDs0 * X, ds_0);
    });
  }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
