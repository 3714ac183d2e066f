// The core loops of the Kalman scan over one staged chunk and one tile of W vectors of channels.
#ifndef KLA_CPU_KALMAN_H
#define KLA_CPU_KALMAN_H

#include "../lane.h"
#include "stage.h"
#include "tile.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

struct Kalman {
  static constexpr bool kHasVariance = true;

  // Time outside, slots inside: N * W independent chains hide the latency of the division, and the
  // state of a tile stays in L1.
  template <class T, int W, bool VAR>
  static void forward(const Stage<T>& in, State<T>& state, int64_t d, T* y, T* y_var) {
    constexpr int L = kLanes<T>;
    const int64_t width = in.width;
    for (int64_t j = 0; j < in.count; ++j) {
      Vec<T> lam_v[W], lv[W], y_acc[W], var_acc[W];
      for (int w = 0; w < W; ++w) {
        lam_v[w] = load(in.lam_v + j * width + d + w * L);
        lv[w] = load(in.lv + j * width + d + w * L);
        y_acc[w] = var_acc[w] = Vec<T>{};
      }
      const T *k = in.k + j * in.N, *k2 = in.k2 + j * in.N, *q = in.q + j * in.N;
      int64_t at = d;
      for (int64_t n = 0; n < in.N; ++n, at += width) {
        for (int w = 0; w < W; ++w) {
          const int64_t i = at + w * L;
          const auto x = filter_step<Vec<T>>(load(state.a + i), load(state.p + i), k2[n] * lam_v[w],
                                             k[n] * lv[w], load(state.s + i), load(state.mu + i));
          store(state.s + i, x.s);
          store(state.mu + i, x.mu);
          y_acc[w] += q[n] * x.mu;
          if (VAR) var_acc[w] += (q[n] * q[n]) * x.s;
        }
      }
      for (int w = 0; w < W; ++w) {
        store(y + j * width + d + w * L, y_acc[w]);
        if (VAR) store(y_var + j * width + d + w * L, var_acc[w]);
      }
    }
  }

  // Repeats the forward steps of slots [n0, n1) and keeps what the adjoint needs of each.
  template <class T, int W>
  static void replay(const Stage<T>& in, const State<T>& state, int64_t d, int64_t n0, int64_t n1,
                     Trajectory<T>& path) {
    constexpr int L = kLanes<T>;
    const int64_t step = (n1 - n0) * W * L;
    for (int64_t n = n0; n < n1; ++n)
      for (int w = 0; w < W; ++w) {
        const int64_t i = n * in.width + d + w * L, o = ((n - n0) * W + w) * L;
        store(path.s + o, load(state.s + i));
        store(path.mu + o, load(state.mu + i));
      }
    for (int64_t j = 0; j < in.count; ++j) {
      Vec<T> lam_v[W], lv[W];
      for (int w = 0; w < W; ++w) {
        lam_v[w] = load(in.lam_v + j * in.width + d + w * L);
        lv[w] = load(in.lv + j * in.width + d + w * L);
      }
      T *s = path.s + j * step, *mu = path.mu + j * step, *r = path.r + j * step;
      const T *k = in.k + j * in.N, *k2 = in.k2 + j * in.N;
      int64_t at = n0 * in.width + d;
      for (int64_t n = n0; n < n1; ++n, at += in.width) {
        for (int w = 0; w < W; ++w, s += L, mu += L, r += L) {
          const int64_t i = at + w * L;
          const auto x = filter_step<Vec<T>>(load(state.a + i), load(state.p + i), k2[n] * lam_v[w],
                                             k[n] * lv[w], load(s), load(mu));
          store(s + step, x.s);
          store(mu + step, x.mu);
          store(r, x.r);
        }
      }
    }
  }

  // Walks the chunk backwards. acc_v collects sum_n k db, acc_lam sum_n k^2 dphi; dv and dlam_v follow
  // from them once all slots are in.
  template <class T, int W, bool VAR>
  static void adjoint(const Stage<T>& in, const State<T>& state, int64_t d, int64_t n0, int64_t n1,
                      const Trajectory<T>& path, Adjoint<T>& adj) {
    constexpr int L = kLanes<T>;
    const int64_t width = in.width, step = (n1 - n0) * W * L;
    for (int64_t j = in.count - 1; j >= 0; --j) {
      Vec<T> lam_v[W], lv[W], dy[W], dy_var[W], acc_v[W], acc_lam[W];
      for (int w = 0; w < W; ++w) {
        const int64_t i = j * width + d + w * L;
        lam_v[w] = load(in.lam_v + i);
        lv[w] = load(in.lv + i);
        dy[w] = load(adj.dy + i);
        dy_var[w] = VAR ? load(adj.dy_var + i) : Vec<T>{};
        acc_v[w] = n0 ? load(adj.acc_v + i) : Vec<T>{};
        acc_lam[w] = n0 ? load(adj.acc_lam + i) : Vec<T>{};
      }
      const T *k = in.k + j * in.N, *k2 = in.k2 + j * in.N, *q = in.q + j * in.N;
      const T *s = path.s + j * step, *mu = path.mu + j * step, *r = path.r + j * step;
      int64_t at = n0 * width + d;
      for (int64_t n = n0; n < n1; ++n, at += width) {
        Vec<T> dk{}, dq{};
        for (int w = 0; w < W; ++w, s += L, mu += L, r += L) {
          const int64_t i = at + w * L;
          const Vec<T> s_new = load(s + step), mu_new = load(mu + step);
          const Vec<T> dmu = load(adj.dmu + i) + q[n] * dy[w];
          Vec<T> ds = load(adj.ds + i);
          if (VAR) ds += (q[n] * q[n]) * dy_var[w];
          const auto x = filter_adjoint<Vec<T>>(load(state.a + i), k2[n] * lam_v[w], k[n] * lv[w],
                                                load(s), load(mu), s_new, load(r), dmu, ds);
          store(adj.dmu + i, x.dmu);
          store(adj.ds + i, x.ds);
          store(adj.da + i, load(adj.da + i) + x.da);
          store(adj.dp + i, load(adj.dp + i) + x.dp);
          acc_v[w] += k[n] * x.db;
          acc_lam[w] += k2[n] * x.dphi;
          dk += lv[w] * x.db + (2 * k[n]) * (lam_v[w] * x.dphi);
          dq += dy[w] * mu_new;
          if (VAR) dq += (2 * q[n]) * (dy_var[w] * s_new);
        }
        adj.add_slot(j * in.N + n, d == 0, dk, dq);
      }
      for (int w = 0; w < W; ++w) {
        store(adj.acc_v + j * width + d + w * L, acc_v[w]);
        store(adj.acc_lam + j * width + d + w * L, acc_lam[w]);
      }
    }
  }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
