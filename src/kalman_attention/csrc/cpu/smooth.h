// Smoothing: what the tokens after t say about the latent at t, computed backwards over the chunks that the backward
// pass replays (filtering/smoothing.py). Precision J and information eta are stored in place of ds and dmu, the
// smoothed y and y_var in place of dv and dlam_v.
#ifndef KLA_CPU_SMOOTH_H
#define KLA_CPU_SMOOTH_H

#include "backward.h"
#include "blocks.h"
#include "kalman.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

template <class Filter>
struct Smoother : Filter {
  static constexpr bool kKnownSlots = false, kSmooths = true;

  template <class T, int W, int SLOTS>
  static void replay(const Stage<T>& in, const ChannelRows<T>& rows, const Tiles<T, W>& state, int64_t d,
                     int64_t n0, int64_t n1, T* path) {
    Filter::template replay<T, W, SLOTS, false>(in, rows, state, d, n0, n1, path);
  }

  template <class T, int W, bool, int>
  static void adjoint(const Stage<T>& in, const ChannelRows<T>& rows, const Tiles<T, W>& state, int64_t d,
                      int64_t n0, int64_t n1, const T* path, bool, Sums<T>& sums) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L;
    const int64_t m = Filter::kShared ? state.m : 1, g0 = n0 / m, g1 = n1 / m;
    const int64_t fields = Filter::path_fields(m, m) * X, step = (g1 - g0) * fields;
    constexpr int kMean = Filter::kShared ? int(kBlockPathMu) : int(kPathMu);
    for (int64_t j = in.count - 1; j >= 0; --j) {
      V lam_v[W], lv[W], dt[W], y[W], y_var[W];
      for (int w = 0; w < W; ++w) {
        lam_v[w] = load_any<V>(rows.lam_v.at(j, d + w * L));
        lv[w] = information<V>(load_any<V>(rows.v.at(j, d + w * L)), lam_v[w]);
        dt[w] = Filter::kGaps ? load_any<V>(rows.dt.at(j, d + w * L)) : V{};
      }
      for (const auto& x : {rows.dv, rows.dlam_v}) x.prefetch(j, d + X);
      sums.template load_token<W>(sums.acc_v, j, n0, y);
      sums.template load_token<W>(sums.acc_lam, j, n0, y_var);
      for (int64_t g = g0; g < g1; ++g) {
        const T k2 = in.k2[j * in.G + g], q2 = in.q2[j * in.G + g];
        const T *k = in.k + j * in.N + g * m, *q = in.q + j * in.N + g * m;
        for (int w = 0; w < W; ++w) {
          T *lane = state.block(d, g) + w * L, *slot = lane + kBackwardBlock * X;
          const T* after = path + (j + 1) * step + (g - g0) * fields + w * L;
          const auto to = dynamics<Filter::kGaps, T, X>(lane, dt[w]);
          const V s = load(after + kPathS * X), J = load(lane + kDs * X);
          const V scale = 1 / (1 + J * s), seen_J = J + k2 * lam_v[w];
          const V back = to.a * (1 / (1 + to.noise() * seen_J));
          y_var[w] += q2 * (s * scale);
          store(lane + kDs * X, to.a * (seen_J * back));
          for (int64_t n = 0; n < m; ++n) {
            T* at = slot + (n * kBackwardSlot + kDmu) * X;
            const V eta = load(at);
            y[w] += q[n] * ((load(after + (kMean + n) * X) + s * eta) * scale);
            store(at, (eta + k[n] * lv[w]) * back);
          }
        }
      }
      const bool done = n1 == in.N;
      sums.template store_token<W>(sums.acc_v, j, d, done, y, rows.dv);
      sums.template store_token<W>(sums.acc_lam, j, d, done, y_var, rows.dlam_v);
    }
  }
};

// Smoothed y and y_var of a call whose forward pass has left its checkpoints.
template <class Filter, class T, int W>
int smooth_rows(const kla_scan_params& params) {
  const Scan p(params, 1);
  Arena measure(nullptr);
  measure.take<T>(p.R * p.N * p.D);
  measure.take<T>(p.R * p.G * p.D);
  const Block block(measure.used());
  if (!block) return KLA_ERROR_MEMORY;
  Arena arena(block.data());
  kla_scan_grads out{};
  out.dv = p.y;
  out.dlam_v = p.y_var;
  out.dmean_0 = arena.take<T>(p.R * p.N * p.D);  // what a row says between two waves
  out.dvariance_0 = arena.take<T>(p.R * p.G * p.D);
  return Backward<Smoother<Filter>, T, W>(p, out).run();
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
