// The core loops of the Kalman scan over one staged chunk and one tile of W vectors of channels.
#ifndef KLA_CPU_KALMAN_H
#define KLA_CPU_KALMAN_H

#include "../stretch.h"
#include "stage.h"
#include "tile.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

struct Kalman {
  static constexpr bool kHasVariance = true;

  // Time outside, slots inside: N * W independent chains hide the latency of the division, and the
  // state of a tile stays in L1.
  template <class T, int W, bool VAR>
  static void forward(const Stage<T>& in, Rows<const T> v, Rows<const T> lam, const Tiles<T, W>& state,
                      int64_t d, Rows<T> y, Rows<T> y_var) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L;
    for (int64_t j = 0; j < in.count; ++j) {
      V lam_v[W], lv[W], y_acc[W], var_acc[W];
      for (int w = 0; w < W; ++w) {
        lam_v[w] = load_any<V>(lam.data + j * lam.pitch + d + w * L);
        lv[w] = lam_v[w] * load_any<V>(v.data + j * v.pitch + d + w * L);
        y_acc[w] = var_acc[w] = V{};
      }
      const T *k = in.k + j * in.N, *k2 = in.k2 + j * in.N, *q = in.q + j * in.N;
      T* x = state.tile(d);
      for (int64_t n = 0; n < in.N; ++n, x += kForwardFields * X) {
        const V kn = splat(k[n]), k2n = splat(k2[n]), qn = splat(q[n]);
        for (int w = 0; w < W; ++w) {
          T* lane = x + w * L;
          const auto next = filter_step<V>(load(lane + kA * X), load(lane + kP * X), k2n * lam_v[w],
                                           kn * lv[w], load(lane + kS * X), load(lane + kMu * X));
          store(lane + kS * X, next.s);
          store(lane + kMu * X, next.mu);
          y_acc[w] += qn * next.mu;
          if (VAR) var_acc[w] += (qn * qn) * next.s;
        }
      }
      for (int w = 0; w < W; ++w) {
        store_any(y.data + j * y.pitch + d + w * L, y_acc[w]);
        if (VAR) store_any(y_var.data + j * y_var.pitch + d + w * L, var_acc[w]);
      }
    }
  }

  // Continues the summary of a segment, forward direction.
  template <class T, int W>
  static void filter_map(const Stage<T>& in, const Tiles<T, W>& state, int64_t d) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L;
    for (int64_t j = 0; j < in.count; ++j) {
      const T *k = in.k + j * in.N, *k2 = in.k2 + j * in.N;
      T* x = state.tile(d);
      for (int64_t n = 0; n < in.N; ++n, x += kSummaryFields * X)
        for (int w = 0; w < W; ++w) {
          T* lane = x + w * L;
          const int64_t at = j * in.pitch + d + w * L;
          const FilterMap<V> map{load(lane + kS * X), load(lane + kMu * X), load(lane + kGain * X),
                                 load(lane + kJ * X), load(lane + kEta * X)};
          const auto next = then_token<V>(map, load(lane + kA * X), load(lane + kP * X),
                                          k2[n] * load(in.lam_v + at), k[n] * load(in.lv + at));
          store(lane + kS * X, next.s);
          store(lane + kMu * X, next.mu);
          store(lane + kGain * X, next.gain);
          store(lane + kJ * X, next.J);
          store(lane + kEta * X, next.eta);
        }
    }
  }

  // Continues the summary of a segment, backward direction, and the filter along with it.
  template <class T, int W>
  static void adjoint_map(const Stage<T>& in, const Tiles<T, W>& state, int64_t d, const T* dy,
                          const T* dy_var) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L;
    for (int64_t j = 0; j < in.count; ++j) {
      const T *k = in.k + j * in.N, *k2 = in.k2 + j * in.N, *q = in.q + j * in.N;
      T* x = state.tile(d);
      for (int64_t n = 0; n < in.N; ++n, x += kSummaryFields * X)
        for (int w = 0; w < W; ++w) {
          T* lane = x + w * L;
          const int64_t at = j * in.pitch + d + w * L;
          const V a = load(lane + kA * X);
          const auto step = filter_step<V>(a, load(lane + kP * X), k2[n] * load(in.lam_v + at),
                                           k[n] * load(in.lv + at), load(lane + kS * X),
                                           load(lane + kMu * X));
          const AdjointMap<V> map{load(lane + kGain * X), load(lane + kCross * X),
                                  load(lane + kDmu0 * X), load(lane + kDs0 * X)};
          const auto next = then_token<V>(map, a, step.r, step.e, q[n] * load(dy + at),
                                          (q[n] * q[n]) * load(dy_var + at));
          store(lane + kS * X, step.s);
          store(lane + kMu * X, step.mu);
          store(lane + kGain * X, next.gain);
          store(lane + kCross * X, next.cross);
          store(lane + kDmu0 * X, next.dmu_0);
          store(lane + kDs0 * X, next.ds_0);
        }
    }
  }

  // Repeats the forward steps of slots [n0, n1) and keeps what the adjoint needs of each.
  template <class T, int W>
  static void replay(const Stage<T>& in, const Tiles<T, W>& state, int64_t d, int64_t n0, int64_t n1,
                     T* path) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L;
    const int64_t step = (n1 - n0) * kPathFields * X;
    for (int64_t n = n0; n < n1; ++n) {
      T* first = path + (n - n0) * kPathFields * X;
      memcpy(first + kPathS * X, state.at(d, n, kS), X * sizeof(T));
      memcpy(first + kPathMu * X, state.at(d, n, kMu), X * sizeof(T));
    }
    for (int64_t j = 0; j < in.count; ++j, path += step) {
      V lam_v[W], lv[W];
      for (int w = 0; w < W; ++w) {
        lam_v[w] = load(in.lam_v + j * in.pitch + d + w * L);
        lv[w] = load(in.lv + j * in.pitch + d + w * L);
      }
      const T *k = in.k + j * in.N, *k2 = in.k2 + j * in.N, *x = state.at(d, n0, 0);
      T* at = path;
      for (int64_t n = n0; n < n1; ++n, x += kBackwardFields * X, at += kPathFields * X) {
        const V kn = splat(k[n]), k2n = splat(k2[n]);
        for (int w = 0; w < W; ++w) {
          const T* lane = x + w * L;
          T *now = at + w * L, *after = now + step;
          const auto next = filter_step<V>(load(lane + kA * X), load(lane + kP * X), k2n * lam_v[w],
                                           kn * lv[w], load(now + kPathS * X), load(now + kPathMu * X));
          store(after + kPathS * X, next.s);
          store(after + kPathMu * X, next.mu);
          store(now + kPathR * X, next.r);
          store(now + kPathE * X, next.e);
        }
      }
    }
  }

  // Walks the chunk backwards. acc_v collects sum_n k db, acc_lam sum_n k^2 dphi; dv and dlam_v follow
  // from them once all slots are in. `first` is set for the first tile of a unit.
  template <class T, int W, bool VAR>
  static void adjoint(const Stage<T>& in, const Tiles<T, W>& state, int64_t d, int64_t n0, int64_t n1,
                      const T* path, bool first, Sums<T>& sums) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L;
    const int64_t step = (n1 - n0) * kPathFields * X;
    for (int64_t j = in.count - 1; j >= 0; --j) {
      const int64_t row = j * in.pitch + d;
      V lam_v[W], lv[W], dy[W], dy_var[W], acc_v[W], acc_lam[W];
      for (int w = 0; w < W; ++w) {
        lam_v[w] = load(in.lam_v + row + w * L);
        lv[w] = load(in.lv + row + w * L);
        dy[w] = load(sums.dy + row + w * L);
        dy_var[w] = VAR ? load(sums.dy_var + row + w * L) : V{};
        acc_v[w] = n0 ? load(sums.acc_v + row + w * L) : V{};
        acc_lam[w] = n0 ? load(sums.acc_lam + row + w * L) : V{};
      }
      const T *k = in.k + j * in.N, *k2 = in.k2 + j * in.N, *q = in.q + j * in.N;
      const T* at = path + j * step;
      T* x = state.at(d, n0, 0);
      for (int64_t n = n0; n < n1; ++n, x += kBackwardFields * X, at += kPathFields * X) {
        const V kn = splat(k[n]), k2n = splat(k2[n]), qn = splat(q[n]);
        V lv_db{}, lam_dphi{}, dq{};
        for (int w = 0; w < W; ++w) {
          T* lane = x + w * L;
          const T *now = at + w * L, *after = now + step;
          const FilterStep<V> next{load(after + kPathS * X), load(after + kPathMu * X),
                                   load(now + kPathR * X), load(now + kPathE * X)};
          const V dmu = load(lane + kDmu * X) + qn * dy[w];
          V ds = load(lane + kDs * X);
          if (VAR) ds += (qn * qn) * dy_var[w];
          const auto g = filter_adjoint<V>(load(lane + kA * X), load(now + kPathS * X),
                                           load(now + kPathMu * X), next, dmu, ds);
          store(lane + kDmu * X, g.dmu);
          store(lane + kDs * X, g.ds);
          store(lane + kDa * X, load(lane + kDa * X) + g.da);
          store(lane + kDp * X, load(lane + kDp * X) + g.dp);
          acc_v[w] += kn * g.db;
          acc_lam[w] += k2n * g.dphi;
          lv_db += lv[w] * g.db;
          lam_dphi += lam_v[w] * g.dphi;
          dq += dy[w] * next.mu;
          if (VAR) dq += (2 * qn) * (dy_var[w] * next.s);
        }
        sums.add_slot(j * in.N + n, first, lv_db + 2 * kn * lam_dphi, dq);
      }
      for (int w = 0; w < W; ++w) {
        store(sums.acc_v + row + w * L, acc_v[w]);
        store(sums.acc_lam + row + w * L, acc_lam[w]);
      }
    }
  }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
