// The core loops of the first-order scan h' = exp(dt A) h + dt B x, y = sum_n C h (Mamba's selective
// scan), in the arrays of the Kalman scan: v = x, lam_v = dt, k = B, q = C, a = A, mu = h.
#ifndef KLA_CPU_LINEAR_H
#define KLA_CPU_LINEAR_H

#include "exp.h"
#include "stage.h"
#include "summary.h"
#include "tile.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

struct Linear {
  using Maps = Linear;
  template <class T>
  static constexpr int kFold = 1;
  static constexpr bool kHasVariance = false, kKnownSlots = true, kShared = false, kGaps = false, kSmooths = false;

  template <class T, int W, bool, int SLOTS>
  static void forward(const Stage<T>& in, const ForwardRows<T>& rows, const Tiles<T, W>& state, int64_t d) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L, kRecord = (kForwardBlock + kForwardSlot) * X;
    const int64_t slots = SLOTS ? SLOTS : in.N;
    for (int64_t j = 0; j < in.count; ++j) {
      V dt[W], dt_x[W], y_acc[W];
      for (int w = 0; w < W; ++w) {
        dt[w] = load_any<V>(rows.lam_v.at(j, d + w * L));
        dt_x[w] = dt[w] * load_any<V>(rows.v.at(j, d + w * L));
        y_acc[w] = V{};
        rows.template prefetch<false, false>(j, d + X + w * L);
      }
      const T *b = in.k + j * in.N, *c = in.q + j * in.N;
      T* x = state.tile(d);
      for (int64_t n = 0; n < slots; ++n, x += kRecord) {
        const V bn = splat(b[n]), cn = splat(c[n]);
        for (int w = 0; w < W; ++w) {
          T *lane = x + w * L, *state_h = lane + (kForwardBlock + kMu) * X;
          const V decay = exp<T>(dt[w] * load(lane + kA * X));
          const V h = decay * load(state_h) + bn * dt_x[w];
          store(state_h, h);
          y_acc[w] += cn * h;
        }
      }
      for (int w = 0; w < W; ++w) store_any(rows.y.at(j, d + w * L), y_acc[w]);
    }
  }

  // The summary of a segment: how much of h is left, and what is added to it (or to dh, backward).
  template <class T, int W>
  static void filter_map(const Stage<T>& in, const SummaryRows<T>& rows, const Tiles<T, W>& state, int64_t d) {
    walk_map<T, W, kMu>(in, rows, state, d, [&](int64_t j, int64_t n, int64_t at, Vec<T> decay, Vec<T> h, Vec<T>) {
      const Vec<T> dt_x = load_any<Vec<T>>(rows.lam_v.at(j, at)) * load_any<Vec<T>>(rows.v.at(j, at));
      return decay * h + in.k[j * in.N + n] * dt_x;
    });
  }

  template <class T, int W>
  static void adjoint_map(const Stage<T>& in, const SummaryRows<T>& rows, const Tiles<T, W>& state, int64_t d) {
    walk_map<T, W, kDmu0>(in, rows, state, d, [&](int64_t j, int64_t n, int64_t at, Vec<T>, Vec<T> sum, Vec<T> gain) {
      return sum + gain * (in.q[j * in.N + n] * load_any<Vec<T>>(rows.dy.at(j, at)));
    });
  }

  // Multiplies the gain by the decay of every token; next gives the new value of the other field.
  template <class T, int W, int FIELD, class F>
  static void walk_map(const Stage<T>& in, const SummaryRows<T>& rows, const Tiles<T, W>& state, int64_t d, F next) {
    constexpr int L = kLanes<T>, X = W * L;
    for (int64_t j = 0; j < in.count; ++j)
      for (int64_t n = 0; n < in.N; ++n)
        for (int w = 0; w < W; ++w) {
          T *lane = state.block(d, n) + w * L, *slot = lane + (kSummaryBlock + FIELD) * X;
          const int64_t at = d + w * L;
          const Vec<T> decay = exp<T>(load_any<Vec<T>>(rows.lam_v.at(j, at)) * load(lane + kA * X));
          const Vec<T> gain = decay * load(lane + kGain * X);
          store(lane + kGain * X, gain);
          store(slot, next(j, n, at, decay, load(slot), gain));
        }
  }

  static int64_t path_fields(int64_t slots, int64_t) { return slots * kPathFields; }

  // Keeps h before each token and the decay of the token.
  template <class T, int W, int SLOTS>
  static void replay(const Stage<T>& in, const ChannelRows<T>& rows, const Tiles<T, W>& state, int64_t d,
                     int64_t n0, int64_t n1, T* path) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L, kRecord = (kBackwardBlock + kBackwardSlot) * X;
    const int64_t slots = SLOTS ? SLOTS : n1 - n0, step = slots * kPathFields * X;
    for (int64_t n = 0; n < slots; ++n)
      memcpy(path + (n * kPathFields + kPathMu) * X, state.at(d, n0 + n, kMu), X * sizeof(T));
    for (int64_t j = 0; j < in.count; ++j, path += step) {
      V dt[W], dt_x[W];
      for (int w = 0; w < W; ++w) {
        dt[w] = load_any<V>(rows.lam_v.at(j, d + w * L));
        dt_x[w] = dt[w] * load_any<V>(rows.v.at(j, d + w * L));
      }
      rows.template prefetch_replay<false>(j, d + X);
      const T *b = in.k + j * in.N + n0, *x = state.block(d, n0);
      T* at = path;
      for (int64_t n = 0; n < slots; ++n, x += kRecord, at += kPathFields * X) {
        const V bn = splat(b[n]);
        for (int w = 0; w < W; ++w) {
          T *now = at + w * L, *after = now + step;
          const V decay = exp<T>(dt[w] * load(x + w * L + kA * X));
          store(after + kPathMu * X, decay * load(now + kPathMu * X) + bn * dt_x[w]);
          store(now + kPathR * X, decay);
        }
      }
    }
  }

  // acc_v collects sum_n B dh', acc_lam the part of ddt that comes through the decay.
  template <class T, int W, bool, int SLOTS>
  static void adjoint(const Stage<T>& in, const ChannelRows<T>& rows, const Tiles<T, W>& state, int64_t d,
                      int64_t n0, int64_t n1, const T* path, bool first, Sums<T>& sums) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L, kRecord = (kBackwardBlock + kBackwardSlot) * X;
    const int64_t slots = SLOTS ? SLOTS : n1 - n0, step = slots * kPathFields * X;
    for (int64_t j = in.count - 1; j >= 0; --j) {
      V x_in[W], dt[W], dt_x[W], dy[W], acc_v[W], acc_lam[W];
      for (int w = 0; w < W; ++w) {
        x_in[w] = load_any<V>(rows.v.at(j, d + w * L));
        dt[w] = load_any<V>(rows.lam_v.at(j, d + w * L));
        dt_x[w] = dt[w] * x_in[w];
        dy[w] = load_any<V>(rows.dy.at(j, d + w * L));
      }
      rows.template prefetch_adjoint<false, false>(j, d + X);
      sums.template load_token<W>(sums.acc_v, j, n0, acc_v);
      sums.template load_token<W>(sums.acc_lam, j, n0, acc_lam);
      const int64_t slot = j * in.N + n0;
      const T *b = in.k + slot, *c = in.q + slot, *at = path + j * step;
      T* x = state.block(d, n0);
      for (int64_t n = 0; n < slots; ++n, x += kRecord, at += kPathFields * X) {
        const V bn = splat(b[n]), cn = splat(c[n]);
        V db{}, dc{};
        for (int w = 0; w < W; ++w) {
          T *lane = x + w * L, *dh_at = lane + (kBackwardBlock + kDmu) * X;
          const T *now = at + w * L, *after = now + step;
          const V dh = load(dh_at) + cn * dy[w];
          const V dh_prev = load(now + kPathR * X) * dh;
          const V via_decay = load(now + kPathMu * X) * dh_prev;
          store(dh_at, dh_prev);
          store(lane + kDa * X, load(lane + kDa * X) + dt[w] * via_decay);
          acc_v[w] += bn * dh;
          acc_lam[w] += load(lane + kA * X) * via_decay;
          db += dt_x[w] * dh;
          dc += dy[w] * load(after + kPathMu * X);
        }
        sums.add(sums.dk, slot + n, first, db);
        sums.add(sums.dq, slot + n, first, dc);
      }
      const bool done = n1 == in.N;
      if (done)
        for (int w = 0; w < W; ++w) acc_lam[w] += x_in[w] * acc_v[w];
      sums.template store_value<W>(j, d, done, acc_v, dt, rows.dv);
      sums.template store_token<W>(sums.acc_lam, j, d, done, acc_lam, rows.dlam_v);
    }
  }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
