// The core loops of the Kalman scan where slots form blocks of m that share a variance: one division per block, and
// two products per slot for its mean. m is known only at run time.
#ifndef KLA_CPU_BLOCKS_H
#define KLA_CPU_BLOCKS_H

#include "gaps.h"
#include "stage.h"
#include "summary.h"
#include "tile.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

template <bool GAPS>
struct Blocks : Summary<GAPS> {
  static constexpr bool kHasVariance = true, kKnownSlots = false, kShared = true, kGaps = GAPS, kSmooths = false;

  // Slots whose dk and dq are folded into one vector each. Sums of dk and dq over channels were half of the time of
  // the adjoint; folding four slots quarters their memory traffic.
  template <class T>
  static constexpr int kFold = kLanes<T> < 4 ? kLanes<T> : 4;

  // Tokens whose means are updated together: a slot is read and written once for all of them.
  static constexpr int kTokens = 2;

  // From this many slots on, means are stored divided by c, the product of the factors `keep` so far. A token then
  // takes one product less per slot: with mu = c nu, nu' = nu + k gain / c'. Before c underflows (kLeastC), and at the
  // end of a chunk, the next tokens use the rule for few slots, which resets c to 1. The work on c is per block, so it
  // is worth it only if many slots share it.
  static constexpr int64_t kManySlots = 32;
  template <class T>
  static constexpr T kLeastC = T(0x1p-24);

  template <class T, int W, bool VAR, int>
  static void forward(const Stage<T>& in, const ForwardRows<T>& rows, const Tiles<T, W>& state, int64_t d) {
    const bool many = state.m >= kManySlots;
    for (int64_t g = 0; g < in.G; ++g) std::fill(state.at(d, g, kC), state.at(d, g, kC) + W * kLanes<T>, T(1));
    int64_t j = 0;
    for (; j + kTokens <= in.count; j += kTokens)
      forward_tokens<kTokens, T, W, VAR>(in, rows, state, d, j, many && j + kTokens < in.count);
    for (; j < in.count; ++j) forward_tokens<1, T, W, VAR>(in, rows, state, d, j, false);
  }

  template <int J, class T, int W, bool VAR>
  KLA_INLINE void forward_tokens(const Stage<T>& in, const ForwardRows<T>& rows, const Tiles<T, W>& state, int64_t d,
                                 int64_t j0, bool divided) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L;
    const int64_t m = state.m;
    V lam_v[J][W], lv[J][W], dt[J][W], y_acc[J][W], var_acc[J][W];
    for (int j = 0; j < J; ++j)
      for (int w = 0; w < W; ++w) {
        const int64_t t = j0 + j, at = d + w * L;
        lam_v[j][w] = load_any<V>(rows.lam_v.at(t, at));
        lv[j][w] = information<V>(load_any<V>(rows.v.at(t, at)), lam_v[j][w]);
        if (GAPS) dt[j][w] = load_any<V>(rows.dt.at(t, at));
        y_acc[j][w] = var_acc[j][w] = V{};
        rows.template prefetch<VAR, GAPS>(t, at + X);
      }
    for (int64_t g = 0; g < in.G; ++g) {
      T* block = state.block(d, g);
      V keep[J][W], gain[J][W], c[J][W];
      bool small = !divided;
      for (int w = 0; w < W; ++w) {
        T* lane = block + w * L;
        V s = load(lane + kS * X), kept = load(lane + kC * X);
        for (int j = 0; j < J; ++j) {
          const int64_t at = (j0 + j) * in.G + g;
          const auto to = dynamics<GAPS, T, X>(lane, dt[j][w]);
          const auto next = filter_block<V>(to, in.k2[at] * lam_v[j][w], lv[j][w], s);
          s = next.s;
          keep[j][w] = next.keep;
          gain[j][w] = next.gain;
          c[j][w] = kept = kept * next.keep;
          if (VAR) var_acc[j][w] += in.q2[at] * s;
        }
        store(lane + kS * X, s);
        small = small || any_below<T>(kept, kLeastC<T>);
      }
      for (int w = 0; w < W; ++w) {
        store(block + kC * X + w * L, small ? splat(T(1)) : c[J - 1][w]);
        if (small) keep[0][w] = c[0][w];
        else
          for (int j = 0; j < J; ++j) gain[j][w] = gain[j][w] / c[j][w];
      }
      V y[J][W];
      T* mean = block + (kSharedBlock + kMu) * X;
      const int64_t at = j0 * in.N + g * m;
      if (small) forward_means<J, false, T, W>(m, mean, in.N, in.k + at, in.q + at, keep, gain, y);
      else forward_means<J, true, T, W>(m, mean, in.N, in.k + at, in.q + at, keep, gain, y);
      for (int j = 0; j < J; ++j)
        for (int w = 0; w < W; ++w) y_acc[j][w] += small ? y[j][w] : c[j][w] * y[j][w];
    }
    for (int j = 0; j < J; ++j)
      for (int w = 0; w < W; ++w) {
        store_any(rows.y.at(j0 + j, d + w * L), y_acc[j][w]);
        if (VAR) store_any(rows.y_var.at(j0 + j, d + w * L), var_acc[j][w]);
      }
  }

  // The means of a block after J tokens and what is read of them, or both divided by c.
  template <int J, bool DIVIDED, class T, int W>
  KLA_INLINE void forward_means(int64_t m, T* mean, int64_t N, const T* k, const T* q, const Vec<T> (&keep)[J][W],
                                const Vec<T> (&gain)[J][W], Vec<T> (&y)[J][W]) {
    constexpr int L = kLanes<T>, X = W * L;
    for (int j = 0; j < J; ++j)
      for (int w = 0; w < W; ++w) y[j][w] = Vec<T>{};
    for (int64_t n = 0; n < m; ++n)
      for (int w = 0; w < W; ++w) {
        T* at = mean + n * kForwardSlot * X + w * L;
        Vec<T> mu = load(at);
        for (int j = 0; j < J; ++j) {
          mu = (DIVIDED ? mu : keep[j][w] * mu) + k[j * N + n] * gain[j][w];
          y[j][w] += q[j * N + n] * mu;
        }
        store(at, mu);
      }
  }

  static int64_t path_fields(int64_t slots, int64_t m) { return slots / m * (kBlockPathMu + m); }

  // Repeats the forward steps of the blocks of slots [n0, n1) and keeps what the adjoint needs of each.
  template <class T, int W, int, bool ADJOINT = true>
  static void replay(const Stage<T>& in, const ChannelRows<T>& rows, const Tiles<T, W>& state, int64_t d,
                     int64_t n0, int64_t n1, T* path) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L;
    const int64_t m = state.m, g0 = n0 / m, g1 = n1 / m, fields = (kBlockPathMu + m) * X;
    const int64_t step = (g1 - g0) * fields;
    for (int64_t g = g0; g < g1; ++g) {
      T* first = path + (g - g0) * fields;
      memcpy(first + kBlockPathS * X, state.at(d, g, kS), X * sizeof(T));
      for (int64_t n = 0; n < m; ++n)
        memcpy(first + (kBlockPathMu + n) * X, state.at(d, g * m + n, kMu), X * sizeof(T));
    }
    for (int64_t j = 0; j < in.count; ++j, path += step) {
      V lam_v[W], lv[W], dt[W];
      for (int w = 0; w < W; ++w) {
        lam_v[w] = load_any<V>(rows.lam_v.at(j, d + w * L));
        lv[w] = information<V>(load_any<V>(rows.v.at(j, d + w * L)), lam_v[w]);
        if (GAPS) dt[w] = load_any<V>(rows.dt.at(j, d + w * L));
      }
      rows.template prefetch_replay<GAPS>(j, d + X);
      const T* k = in.k + j * in.N + n0;
      for (int64_t g = g0; g < g1; ++g, k += m) {
        T* now = path + (g - g0) * fields;
        const V k2 = splat(in.k2[j * in.G + g]);
        V keep[W], gain[W];
        for (int w = 0; w < W; ++w) {
          T* at = now + w * L;
          const auto to = dynamics<GAPS, T, X>(state.block(d, g) + w * L, dt[w]);
          const auto next = filter_block<V>(to, k2 * lam_v[w], lv[w], load(at + kBlockPathS * X));
          if (ADJOINT) store(at + kBlockPathR * X, next.r);
          store(at + step + kBlockPathS * X, next.s);
          keep[w] = next.keep;
          gain[w] = next.gain;
        }
#pragma GCC unroll 4
        for (int64_t n = 0; n < m; ++n)
          for (int w = 0; w < W; ++w) {
            T* at = now + (kBlockPathMu + n) * X + w * L;
            store(at + step, keep[w] * load(at) + k[n] * gain[w]);
          }
      }
    }
  }

  // Walks the chunk backwards. What the slots of a block have in common in dk and dq is summed per block.
  template <class T, int W, bool VAR, int>
  static void adjoint(const Stage<T>& in, const ChannelRows<T>& rows, const Tiles<T, W>& state, int64_t d,
                      int64_t n0, int64_t n1, const T* path, bool first, Sums<T>& sums) {
    using V = Vec<T>;
    constexpr int L = kLanes<T>, X = W * L, F = kFold<T>;
    const int64_t m = state.m, g0 = n0 / m, g1 = n1 / m, fields = (kBlockPathMu + m) * X;
    const int64_t step = (g1 - g0) * fields;
    for (int64_t j = in.count - 1; j >= 0; --j) {
      V v[W], lam_v[W], lv[W], dt[W], dy[W], dy_var[W], acc_v[W], acc_lam[W], acc_dt[W];
      for (int w = 0; w < W; ++w) {
        lam_v[w] = load_any<V>(rows.lam_v.at(j, d + w * L));
        v[w] = seen<V>(load_any<V>(rows.v.at(j, d + w * L)), lam_v[w]);
        lv[w] = lam_v[w] * v[w];
        if (GAPS) dt[w] = load_any<V>(rows.dt.at(j, d + w * L));
        dy[w] = load_any<V>(rows.dy.at(j, d + w * L));
        dy_var[w] = VAR ? load_any<V>(rows.dy_var.at(j, d + w * L)) : V{};
      }
      rows.template prefetch_adjoint<VAR, GAPS>(j, d + X);
      sums.template load_token<W>(sums.acc_v, j, n0, acc_v);
      sums.template load_token<W>(sums.acc_lam, j, n0, acc_lam);
      if (GAPS) sums.template load_token<W>(sums.acc_dt, j, n0, acc_dt);
      for (int64_t g = g0; g < g1; ++g) {
        T* block = state.block(d, g);
        const T* now = path + j * step + (g - g0) * fields;
        BlockStep<V> next[W];
        V k_dmu[W], mu_dmu[W], a[W];
        Decay<V> gap[W];
        for (int w = 0; w < W; ++w) {
          const T* at = now + w * L;
          a[w] = load(block + kA * X + w * L);
          if constexpr (GAPS) {
            gap[w] = decay<T>(a[w] * dt[w]);
            a[w] = gap[w].whole();
          }
          const V s_new = load(at + step + kBlockPathS * X), r = load(at + kBlockPathR * X);
          next[w] = {s_new, r, a[w] * r, s_new * lv[w]};
          k_dmu[w] = mu_dmu[w] = V{};
        }
        const T *k = in.k + j * in.N + g * m, *q = in.q + j * in.N + g * m, *mean = now + kBlockPathMu * X;
        T* dmean = block + (kBackwardBlock + kDmu) * X;
        const auto walk = [&](int64_t n) KLA_ALWAYS -> SlotGrad<V> {
          SlotGrad<V> slot{};
          const T* mu = mean + n * X;
          for (int w = 0; w < W; ++w, mu += L) {
            T* at = dmean + n * kBackwardSlot * X + w * L;
            const V dmu = load(at) + q[n] * dy[w];
            k_dmu[w] += k[n] * dmu;
            mu_dmu[w] += load(mu) * dmu;
            slot.dk += next[w].gain * dmu;
            slot.dq += dy[w] * load(mu + step);
            store(at, next[w].keep * dmu);
          }
          return slot;
        };
        const int64_t slots = (j * in.G + g) * ((m + F - 1) / F);
        for (int64_t n = 0; n < m; n += F) {
          const auto slot = [&](int i) KLA_ALWAYS { return n + i < m ? walk(n + i) : SlotGrad<V>{}; };
          const auto grad = fold_slots<T, F>(0, slot);
          sums.add(sums.dk, slots + n / F, first, grad.dk);
          sums.add(sums.dq, slots + n / F, first, grad.dq);
        }
        const T k2 = in.k2[j * in.G + g], q2 = in.q2[j * in.G + g];
        V lam_dphi{}, s_dy{};
        for (int w = 0; w < W; ++w) {
          T* lane = block + w * L;
          const V s = load(now + w * L + kBlockPathS * X);
          V ds = load(lane + kDs * X);
          if (VAR) {
            s_dy += next[w].s * dy_var[w];
            ds += q2 * dy_var[w];
          }
          // Sums over slots first: of what the new means leave of the value, and of the new means, times dmu.
          const V rest_dmu = next[w].r * (v[w] * k_dmu[w] - k2 * (a[w] * mu_dmu[w]));
          const V new_dmu = next[w].keep * mu_dmu[w] + next[w].gain * k_dmu[w];
          const auto grad = block_adjoint<V>(splat(k2), lam_v[w], next[w].s, next[w].r, rest_dmu, new_dmu, ds);
          const V a_dP = a[w] * grad.dP;
          if constexpr (GAPS) {
            const V du = next[w].keep * mu_dmu[w] + (s + s) * (a[w] * a_dP);
            acc_dt[w] += add_gap<T, X>(lane, gap[w], a[w], du, grad.dP);
          } else {
            store(lane + kDa * X, load(lane + kDa * X) + (next[w].r * mu_dmu[w] + s * (a_dP + a_dP)));
            store(lane + kDp * X, load(lane + kDp * X) + grad.dP);
          }
          store(lane + kDs * X, a[w] * a_dP);
          acc_v[w] += next[w].s * k_dmu[w];
          acc_lam[w] += grad.dlam_v;
          lam_dphi += lam_v[w] * grad.dphi;
        }
        sums.add(sums.lam_dphi, j * in.G + g, first, lam_dphi);
        if (VAR) sums.add(sums.s_dy, j * in.G + g, first, s_dy);
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
