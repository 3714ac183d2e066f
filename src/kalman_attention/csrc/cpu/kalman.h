// The core loops of the Kalman scan over one staged chunk and one tile of W vectors of channels, where every
// slot has a variance of its own.
#ifndef KLA_CPU_KALMAN_H
#define KLA_CPU_KALMAN_H

#include "gaps.h"
#include "stage.h"
#include "summary.h"
#include "tile.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

// GAPS: with the time between tokens. Only the loop without has copies for the usual numbers of slots.
template <bool GAPS>
struct Kalman : Summary<GAPS> {
  template <class T>
  static constexpr int kFold = 1;
  static constexpr bool kHasVariance = true, kKnownSlots = !GAPS, kShared = false, kGaps = GAPS, kSmooths = false;

  // Time outside, slots inside: N * W independent chains hide the latency of the division, and the
  // state of a tile stays in L1.
  template <class T, int W, bool VAR, int SLOTS>
  static void forward(const Stage<T>& in, const ForwardRows<T>& rows, const Tiles<T, W>& state, int64_t d) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L, kRecord = (kForwardBlock + kForwardSlot) * X;
    const int64_t slots = SLOTS ? SLOTS : in.N;
    for (int64_t j = 0; j < in.count; ++j) {
      V lam_v[W], lv[W], dt[W], y_acc[W], var_acc[W];
      for (int w = 0; w < W; ++w) {
        lam_v[w] = load_any<V>(rows.lam_v.at(j, d + w * L));
        lv[w] = information<V>(load_any<V>(rows.v.at(j, d + w * L)), lam_v[w]);
        if (GAPS) dt[w] = load_any<V>(rows.dt.at(j, d + w * L));
        y_acc[w] = var_acc[w] = V{};
        rows.template prefetch<VAR, GAPS>(j, d + X + w * L);
      }
      const T *k = in.k + j * in.N, *k2 = in.k2 + j * in.N, *q = in.q + j * in.N, *q2 = in.q2 + j * in.N;
      T* x = state.tile(d);
      for (int64_t n = 0; n < slots; ++n, x += kRecord) {
        const V kn = splat(k[n]), k2n = splat(k2[n]), qn = splat(q[n]), q2n = VAR ? splat(q2[n]) : V{};
        for (int w = 0; w < W; ++w) {
          T *lane = x + w * L, *slot = lane + kForwardBlock * X;
          const auto next = filter_token<V>(dynamics<GAPS, T, X>(lane, dt[w]), k2n * lam_v[w], kn * lv[w],
                                           load(lane + kS * X), load(slot + kMu * X));
          store(lane + kS * X, next.s);
          store(slot + kMu * X, next.mu);
          y_acc[w] += qn * next.mu;
          if (VAR) var_acc[w] += q2n * next.s;
        }
      }
      for (int w = 0; w < W; ++w) {
        store_any(rows.y.at(j, d + w * L), y_acc[w]);
        if (VAR) store_any(rows.y_var.at(j, d + w * L), var_acc[w]);
      }
    }
  }

  static int64_t path_fields(int64_t slots, int64_t) { return slots * kPathFields; }

  // Repeats the forward steps of slots [n0, n1) and keeps what the adjoint needs of each, or the beliefs alone.
  template <class T, int W, int SLOTS, bool ADJOINT = true>
  static void replay(const Stage<T>& in, const ChannelRows<T>& rows, const Tiles<T, W>& state, int64_t d,
                     int64_t n0, int64_t n1, T* path) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L, kRecord = (kBackwardBlock + kBackwardSlot) * X;
    const int64_t slots = SLOTS ? SLOTS : n1 - n0, step = slots * kPathFields * X;
    for (int64_t n = 0; n < slots; ++n) {
      T* first = path + n * kPathFields * X;
      memcpy(first + kPathS * X, state.at(d, n0 + n, kS), X * sizeof(T));
      memcpy(first + kPathMu * X, state.at(d, n0 + n, kMu), X * sizeof(T));
    }
    for (int64_t j = 0; j < in.count; ++j, path += step) {
      V v[W], lam_v[W], lv[W], dt[W];
      for (int w = 0; w < W; ++w) {
        lam_v[w] = load_any<V>(rows.lam_v.at(j, d + w * L));
        v[w] = seen<V>(load_any<V>(rows.v.at(j, d + w * L)), lam_v[w]);
        lv[w] = lam_v[w] * v[w];
        if (GAPS) dt[w] = load_any<V>(rows.dt.at(j, d + w * L));
      }
      rows.template prefetch_replay<GAPS>(j, d + X);
      const T *k = in.k + j * in.N + n0, *k2 = in.k2 + j * in.N + n0, *x = state.block(d, n0);
      T* at = path;
      for (int64_t n = 0; n < slots; ++n, x += kRecord, at += kPathFields * X) {
        const V kn = splat(k[n]), k2n = splat(k2[n]);
        for (int w = 0; w < W; ++w) {
          const T* lane = x + w * L;
          T *now = at + w * L, *after = now + step;
          const auto to = dynamics<GAPS, T, X>(lane, dt[w]);
          const V m = to.a * load(now + kPathMu * X);
          const auto next = filter_predicted<V>(to, k2n * lam_v[w], kn * lv[w], load(now + kPathS * X), m);
          store(after + kPathS * X, next.s);
          store(after + kPathMu * X, next.mu);
          if (!ADJOINT) continue;
          store(now + kPathR * X, next.r);
          store(now + kPathRest * X, remainder<V>(kn, v[w], m, next.r));
        }
      }
    }
  }

  // Walks the chunk backwards. acc_v collects sum_n k db, acc_lam what the slots add to dlam_v. `first` is set
  // for the first tile of a unit.
  template <class T, int W, bool VAR, int SLOTS>
  static void adjoint(const Stage<T>& in, const ChannelRows<T>& rows, const Tiles<T, W>& state, int64_t d,
                      int64_t n0, int64_t n1, const T* path, bool first, Sums<T>& sums) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L, kRecord = (kBackwardBlock + kBackwardSlot) * X;
    const int64_t slots = SLOTS ? SLOTS : n1 - n0, step = slots * kPathFields * X;
    for (int64_t j = in.count - 1; j >= 0; --j) {
      V lam_v[W], lv[W], dt[W], dy[W], dy_var[W], acc_v[W], acc_lam[W], acc_dt[W];
      for (int w = 0; w < W; ++w) {
        lam_v[w] = load_any<V>(rows.lam_v.at(j, d + w * L));
        lv[w] = information<V>(load_any<V>(rows.v.at(j, d + w * L)), lam_v[w]);
        if (GAPS) dt[w] = load_any<V>(rows.dt.at(j, d + w * L));
        dy[w] = load_any<V>(rows.dy.at(j, d + w * L));
        dy_var[w] = VAR ? load_any<V>(rows.dy_var.at(j, d + w * L)) : V{};
      }
      rows.template prefetch_adjoint<VAR, GAPS>(j, d + X);
      sums.template load_token<W>(sums.acc_v, j, n0, acc_v);
      sums.template load_token<W>(sums.acc_lam, j, n0, acc_lam);
      if (GAPS) sums.template load_token<W>(sums.acc_dt, j, n0, acc_dt);
      const int64_t slot = j * in.N + n0;
      const T *k = in.k + slot, *k2 = in.k2 + slot, *q = in.q + slot, *q2 = in.q2 + slot, *at = path + j * step;
      T* x = state.block(d, n0);
      for (int64_t n = 0; n < slots; ++n, x += kRecord, at += kPathFields * X) {
        const V kn = splat(k[n]), k2n = splat(k2[n]), qn = splat(q[n]);
        V lv_db{}, lam_dphi{}, dq{};
        for (int w = 0; w < W; ++w) {
          T *lane = x + w * L, *mean = lane + kBackwardBlock * X;
          const T *now = at + w * L, *after = now + step;
          const FilterStep<V> next{load(after + kPathS * X), load(after + kPathMu * X), load(now + kPathR * X)};
          V ds = load(lane + kDs * X);
          const V dmu = load(mean + kDmu * X) + qn * dy[w];
          dq += dy[w] * next.mu;
          if (VAR) {
            dq += (2 * qn) * (dy_var[w] * next.s);
            ds += q2[n] * dy_var[w];
          }
          const V s = load(now + kPathS * X), mu = load(now + kPathMu * X);
          const V rest = load(now + kPathRest * X);
          V a = load(lane + kA * X);
          Decay<V> gap;
          if constexpr (GAPS) {
            gap = decay<T>(a * dt[w]);
            a = gap.whole();
          }
          const auto g = filter_adjoint<V>(a, kn, k2n, lam_v[w], s, mu, next, rest, dmu, ds);
          if constexpr (GAPS) {
            acc_dt[w] += add_gap<T, X>(lane, gap, a, mu * g.dmu + (s + s) * g.ds, g.dp);
          } else {
            store(lane + kDa * X, load(lane + kDa * X) + g.da);
            store(lane + kDp * X, load(lane + kDp * X) + g.dp);
          }
          store(mean + kDmu * X, g.dmu);
          store(lane + kDs * X, g.ds);
          acc_v[w] += kn * g.db;
          acc_lam[w] += g.dlam_v;
          lv_db += lv[w] * g.db;
          lam_dphi += lam_v[w] * g.dphi;
        }
        sums.add(sums.dk, slot + n, first, lv_db + 2 * kn * lam_dphi);
        sums.add(sums.dq, slot + n, first, dq);
      }
      const bool done = n1 == in.N;
      sums.template store_value<W>(j, d, done, acc_v, lam_v, rows.dv);
      sums.template store_token<W>(sums.acc_lam, j, d, done, acc_lam, rows.dlam_v);
      if (GAPS) sums.template store_token<W>(sums.acc_dt, j, d, done, acc_dt, rows.ddt);
    }
  }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
