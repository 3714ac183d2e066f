// The core loops of the first-order scan h' = exp(dt A) h + dt B x, y = sum_n C h (Mamba's selective
// scan), in the arrays of the Kalman scan: v = x, lam_v = dt, k = B, q = C, a = A, mu = h.
#ifndef KLA_CPU_LINEAR_H
#define KLA_CPU_LINEAR_H

#include "exp.h"
#include "stage.h"
#include "tile.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

struct Linear {
  static constexpr bool kHasVariance = false;

  template <class T, int W, bool>
  static void forward(const Stage<T>& in, Rows<const T> v, Rows<const T> lam, const Tiles<T, W>& state,
                      int64_t d, Rows<T> y, Rows<T>) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L;
    for (int64_t j = 0; j < in.count; ++j) {
      V dt[W], dt_x[W], y_acc[W];
      for (int w = 0; w < W; ++w) {
        dt[w] = load_any<V>(lam.data + j * lam.pitch + d + w * L);
        dt_x[w] = dt[w] * load_any<V>(v.data + j * v.pitch + d + w * L);
        y_acc[w] = V{};
      }
      const T *b = in.k + j * in.N, *c = in.q + j * in.N;
      T* x = state.tile(d);
      for (int64_t n = 0; n < in.N; ++n, x += kForwardFields * X) {
        const V bn = splat(b[n]), cn = splat(c[n]);
        for (int w = 0; w < W; ++w) {
          T* lane = x + w * L;
          const V decay = exp<T>(dt[w] * load(lane + kA * X));
          const V h = decay * load(lane + kMu * X) + bn * dt_x[w];
          store(lane + kMu * X, h);
          y_acc[w] += cn * h;
        }
      }
      for (int w = 0; w < W; ++w) store_any(y.data + j * y.pitch + d + w * L, y_acc[w]);
    }
  }

  // The summary of a segment: how much of h is left, and what is added to it (or to dh, backward).
  template <class T, int W>
  static void filter_map(const Stage<T>& in, const Tiles<T, W>& state, int64_t d) {
    walk_map<T, W, kMu>(in, state, d, [&](int64_t j, int64_t n, int64_t at, Vec<T> decay, Vec<T> h, Vec<T>) {
      return decay * h + in.k[j * in.N + n] * load(in.lv + at);
    });
  }

  template <class T, int W>
  static void adjoint_map(const Stage<T>& in, const Tiles<T, W>& state, int64_t d, const T* dy,
                          const T*) {
    walk_map<T, W, kDmu0>(in, state, d, [&](int64_t j, int64_t n, int64_t at, Vec<T>, Vec<T> sum, Vec<T> gain) {
      return sum + gain * (in.q[j * in.N + n] * load(dy + at));
    });
  }

  // Multiplies the gain by the decay of every token; next gives the new value of the other field.
  template <class T, int W, int FIELD, class F>
  static void walk_map(const Stage<T>& in, const Tiles<T, W>& state, int64_t d, F next) {
    constexpr int L = kLanes<T>, X = W * L;
    for (int64_t j = 0; j < in.count; ++j)
      for (int64_t n = 0; n < in.N; ++n)
        for (int w = 0; w < W; ++w) {
          T* lane = state.at(d, n, 0) + w * L;
          const int64_t at = j * in.pitch + d + w * L;
          const Vec<T> decay = exp<T>(load(in.lam_v + at) * load(lane + kA * X));
          const Vec<T> gain = decay * load(lane + kGain * X);
          store(lane + kGain * X, gain);
          store(lane + FIELD * X, next(j, n, at, decay, load(lane + FIELD * X), gain));
        }
  }

  // Keeps h before each token and the decay of the token.
  template <class T, int W>
  static void replay(const Stage<T>& in, const Tiles<T, W>& state, int64_t d, int64_t n0, int64_t n1,
                     T* path) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L;
    const int64_t step = (n1 - n0) * kPathFields * X;
    for (int64_t n = n0; n < n1; ++n)
      memcpy(path + ((n - n0) * kPathFields + kPathMu) * X, state.at(d, n, kMu), X * sizeof(T));
    for (int64_t j = 0; j < in.count; ++j, path += step) {
      const int64_t row = j * in.pitch + d;
      const T *b = in.k + j * in.N, *x = state.at(d, n0, 0);
      T* at = path;
      for (int64_t n = n0; n < n1; ++n, x += kBackwardFields * X, at += kPathFields * X) {
        const V bn = splat(b[n]);
        for (int w = 0; w < W; ++w) {
          T *now = at + w * L, *after = now + step;
          const V dt = load(in.lam_v + row + w * L), dt_x = load(in.lv + row + w * L);
          const V decay = exp<T>(dt * load(x + w * L + kA * X));
          store(after + kPathMu * X, decay * load(now + kPathMu * X) + bn * dt_x);
          store(now + kPathR * X, decay);
        }
      }
    }
  }

  // acc_v collects sum_n B dh', acc_lam the part of ddt that comes through the decay.
  template <class T, int W, bool>
  static void adjoint(const Stage<T>& in, const Tiles<T, W>& state, int64_t d, int64_t n0, int64_t n1,
                      const T* path, bool first, Sums<T>& sums) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L;
    const int64_t step = (n1 - n0) * kPathFields * X;
    for (int64_t j = in.count - 1; j >= 0; --j) {
      const int64_t row = j * in.pitch + d;
      V acc_v[W], acc_lam[W];
      for (int w = 0; w < W; ++w) {
        acc_v[w] = n0 ? load(sums.acc_v + row + w * L) : V{};
        acc_lam[w] = n0 ? load(sums.acc_lam + row + w * L) : V{};
      }
      const T *b = in.k + j * in.N, *c = in.q + j * in.N, *at = path + j * step;
      T* x = state.at(d, n0, 0);
      for (int64_t n = n0; n < n1; ++n, x += kBackwardFields * X, at += kPathFields * X) {
        const V bn = splat(b[n]), cn = splat(c[n]);
        V db{}, dc{};
        for (int w = 0; w < W; ++w) {
          T* lane = x + w * L;
          const T *now = at + w * L, *after = now + step;
          const V dt = load(in.lam_v + row + w * L), dy = load(sums.dy + row + w * L);
          const V dh = load(lane + kDmu * X) + cn * dy;
          const V dh_prev = load(now + kPathR * X) * dh;
          const V via_decay = load(now + kPathMu * X) * dh_prev;
          store(lane + kDmu * X, dh_prev);
          store(lane + kDa * X, load(lane + kDa * X) + dt * via_decay);
          acc_v[w] += bn * dh;
          acc_lam[w] += load(lane + kA * X) * via_decay;
          db += load(in.lv + row + w * L) * dh;
          dc += dy * load(after + kPathMu * X);
        }
        sums.add_slot(j * in.N + n, first, db, dc);
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
