// Forward pass. A block owns the lanes of some channels of one segment and processes its tokens in order; beliefs
// stay in registers, tokens pass through shared memory. With one segment per row that is the lane-serial
// schedule. The time-split schedule divides rows into more segments: kla_summarise computes the effect of each on
// any belief, kla_link passes beliefs from segment to segment, then kla_forward replays them all exactly.
//
// Compiled once per arithmetic type (KLA_T), number of threads per channel (KLA_GROUP), and for slots that
// share a variance (KLA_BLOCKS) and time between tokens (KLA_GAPS) or without.
#include "lanes.h"

namespace kla {

constexpr int kForwardThreads = 128, kForwardSlots = 4, kLinkThreads = 128;
constexpr int kStepThreads = 128, kStepWarps = kStepThreads / 32;
// Blocks per multiprocessor: as many as the registers allow without spills, according to ptxas.
template <class C>
constexpr int kForwardBlocks = C::kDouble ? (C::kGaps ? 2 : 3) : C::kGaps ? 5 : C::kShared ? 6 : 8;
template <class C>
constexpr int kSummaryBlocks = C::kDouble ? 2 : 4;
template <class C>
constexpr int kStepBlocks = C::kDouble ? (C::kGaps ? 4 : 6) : 8;

template <class C>
using ForwardLanes = Lanes<C, kForwardSlots, kForwardThreads>;

template <class C>
struct Tile {
  using T = typename C::T;
  using At = ForwardLanes<C>;
  static constexpr int kTokens = (C::kDouble ? 16 : 32) / (C::kGaps ? 2 : 1);

  // lam_v v becomes y and lam_v becomes y_var. That needs no barrier: the threads of a channel are in
  // one warp, and a sum over them is complete only after all of them have read what it is made of.
  T lv_y[kTokens][At::kChannels];
  T lam_v_y_var[kTokens][At::kChannels];
  T dt[C::kGaps ? kTokens : 1][At::kChannels];
  T k[kTokens][At::kSlots], q[kTokens][At::kSlots];
  T k2[kTokens][At::kBlocks];  // where slots share a variance: |k|^2 of their block
  bool real[kTokens];

  KLA_DEVICE void load(const Params& p, const At& at, Int t) {
    at.stage_values(p, t, lv_y, lam_v_y_var);
    KLA_ROLLED
    for (int i = at.thread; i < kTokens * At::kChannels; i += kForwardThreads)
      lv_y[i / At::kChannels][i % At::kChannels] *= lam_v_y_var[i / At::kChannels][i % At::kChannels];
    if constexpr (C::kGaps) at.stage_channels(p, p.dt, t, dt, p.dt_width);
    at.stage_slots(p, p.k, t, k);
    at.stage_squares(p, p.k, t, k2);
    at.stage_mask(p, t, real);
  }

  KLA_DEVICE T gap(const At& at, int j) const { return C::kGaps ? dt[C::kGaps ? j : 0][at.channel] : T(0); }

  // |k|^2 of the block of slots that variance o of a thread belongs to.
  KLA_DEVICE T square(const At& at, int j, int o) const {
    if constexpr (C::kShared) return k2[j][at.block];
    const T one = k[j][at.slot + o];
    return one * one;
  }

  // Stores y and y_var, or what the slots up to now contribute to them.
  template <bool VAR>
  KLA_DEVICE void store(const Params& p, const At& at, Int t) const {
    const bool begun = at.n0 > 0, done = at.n0 + At::kSlots >= p.G * p.places;
    T* sums = static_cast<T*>(p.channel_sums);
    KLA_ROLLED
    for (int i = at.thread; i < kTokens * At::kChannels; i += kForwardThreads) {
      const int j = i / At::kChannels, c = i % At::kChannels;
      if (t + j >= at.segment.tokens || at.d0 + c >= p.D) continue;
      const Int here = at.dense(p, t + j) * p.D + at.d0 + c, there = p.B * p.T * p.D + here;
      const T y = lv_y[j][c] + (begun ? sums[here] : T(0));
      const T y_var = VAR ? lam_v_y_var[j][c] + (begun ? sums[there] : T(0)) : T(0);
      if (done) {
        write(p.y, p.v.dtype, here, y);
        if (VAR) write(p.y_var, p.v.dtype, here, y_var);
      } else {
        sums[here] = y;
        if (VAR) sums[there] = y_var;
      }
    }
  }
};

// The filter over one segment, with outputs and checkpoints.
template <class C, bool VAR>
KLA_DEVICE void forward(const Params& p) {
  using T = typename C::T;
  using At = ForwardLanes<C>;
  using Shared = Tile<C>;
  using Sum = WarpSum<VAR ? 2 : 1, At::kWide, 32>;
  KLA_SHARED(Shared, tile);
  const At at(p);
  const Segment& seg = at.segment;
  if (!seg.used) return;
  const auto dynamics = at.dynamics(p);
  T s[At::kOwn], mu[kForwardSlots];
  if (seg.first) {
    at.load(p, p.mean_0, seg.row, mu);
    at.load_blocks(p, p.variance_0, seg.row, s);
  } else {
    at.load(p, p.borders, at.number, mu);
    at.load_each(p, p.borders, p.segments + at.number, s);
  }
  for (Int t = 0; t < seg.tokens; t += Shared::kTokens) {
    if (p.checkpoints != nullptr && t % kChunk == 0) {
      at.store(p, p.checkpoints, seg.chunk + t / kChunk, mu);
      at.store_each(p, p.checkpoints, p.chunks + seg.chunk + t / kChunk, s);
    }
    tile.load(p, at, t);
    at.stage_slots(p, p.q, t, tile.q);
    __syncthreads();
    for (int j = 0; j < Shared::kTokens && t + j < seg.tokens; ++j) {
      T out[2] = {T(0), T(0)};  // y, y_var
      if (tile.real[j]) {
        const T lam_v = tile.lam_v_y_var[j][at.channel], lv = tile.lv_y[j][at.channel];
        const T dt = tile.gap(at, j);
        KLA_UNROLL
        for (int o = 0; o < At::kOwn; ++o) {
          const auto to = dynamics.step(o, dt);
          const auto next = variance_step<T>(to.a, to.p, tile.square(at, j, o) * lam_v, s[o]);
          s[o] = next.s;
          T q2 = T(0);
          KLA_UNROLL
          for (int i = o; i < (C::kShared ? kForwardSlots : o + 1); ++i) {
            const T q = tile.q[j][at.slot + i];
            mu[i] = mean_step<T>(next, to.a * mu[i], tile.k[j][at.slot + i] * lv);
            out[0] += q * mu[i];
            q2 += q * q;
          }
          if (VAR) out[1] += q2 * next.s;
        }
      }
      const int first = Sum::run(out, at.lane);
      if (Sum::owner(at.lane)) {
        if (first == 0) tile.lv_y[j][at.channel] = out[0];
        if (VAR && first + Sum::kKept == 2) tile.lam_v_y_var[j][at.channel] = out[1 - first];
      }
    }
    __syncthreads();
    tile.template store<VAR>(p, at, t);
  }
  if (seg.last) {
    at.store(p, p.mean, seg.row, mu);
    at.store_blocks(p, p.variance, seg.row, s);
  }
}

// The effect of a segment on any belief, as the FilterMap of segment.h: s, gain and J for the variances of a
// thread, mu and eta for its slots. The last segment of a row needs none.
template <class C>
KLA_DEVICE void summarise(const Params& p) {
  using T = typename C::T;
  using At = ForwardLanes<C>;
  using Shared = Tile<C>;
  KLA_SHARED(Shared, tile);
  const At at(p);
  const Segment& seg = at.segment;
  if (!seg.used || seg.last) return;
  const auto dynamics = at.dynamics(p);
  T s[At::kOwn], gain[At::kOwn], J[At::kOwn], mu[kForwardSlots], eta[kForwardSlots];
  for (int o = 0; o < At::kOwn; ++o) {
    s[o] = J[o] = T(0);
    gain[o] = T(1);
  }
  for (int i = 0; i < kForwardSlots; ++i) mu[i] = eta[i] = T(0);
  for (Int t = 0; t < seg.tokens; t += Shared::kTokens) {
    tile.load(p, at, t);
    __syncthreads();
    for (int j = 0; j < Shared::kTokens && t + j < seg.tokens; ++j) {
      if (!tile.real[j]) continue;
      const T lam_v = tile.lam_v_y_var[j][at.channel], lv = tile.lv_y[j][at.channel];
      const T dt = tile.gap(at, j);
      KLA_UNROLL
      for (int o = 0; o < At::kOwn; ++o) {
        const auto to = dynamics.step(o, dt);
        const T phi = tile.square(at, j, o) * lam_v, before = to.a * gain[o];
        const auto next = variance_step<T>(to.a, to.p, phi, s[o]);
        s[o] = next.s;
        gain[o] = next.r * before;
        J[o] += (phi * before) * gain[o];
        KLA_UNROLL
        for (int i = o; i < (C::kShared ? kForwardSlots : o + 1); ++i) {
          const T b = tile.k[j][at.slot + i] * lv, m = to.a * mu[i];
          eta[i] += gain[o] * innovation<T>(phi, b, m);
          mu[i] = mean_step<T>(next, m, b);
        }
      }
    }
    __syncthreads();
  }
  at.store_each(p, p.summaries, at.number, s);
  at.store(p, p.summaries, p.segments + at.number, mu);
  at.store_each(p, p.summaries, 2 * p.segments + at.number, gain);
  at.store_each(p, p.summaries, 3 * p.segments + at.number, J);
  at.store(p, p.summaries, 4 * p.segments + at.number, eta);
}

// Passes the belief of every lane from segment to segment; one thread per lane.
template <class T>
KLA_DEVICE void link(const Params& p) {
  const Int lanes = p.N * p.D, field = p.segments * lanes;
  const Int index = static_cast<Int>(blockIdx.x) * kLinkThreads + threadIdx.x;
  if (index >= p.R * lanes) return;
  const Int row = index / lanes, lane = index % lanes, d = lane % p.D;
  const Int block = row * p.G + lane / p.D / p.m;
  const Int number = first_segment(p, row), count = count_segments(p, row);
  const T* maps = static_cast<const T*>(p.summaries);
  T* borders = static_cast<T*>(p.borders);
  T s = static_cast<const T*>(p.variance_0)[block * p.D + d], mu = static_cast<const T*>(p.mean_0)[index];
  for (Int i = number; i + 1 < number + count; ++i) {
    const T* m = maps + i * lanes + lane;
    apply<T>(FilterMap<T>{m[0], m[field], m[2 * field], m[3 * field], m[4 * field]}, s, mu);
    borders[(i + 1) * lanes + lane] = mu;
    borders[field + (i + 1) * lanes + lane] = s;
  }
}

// One token per row: v, lam_v [R, D] and k, q [R, N]. A warp takes 32 channels and every kStepWarps-th
// block of slots, so that the [N, D] arrays are streamed once, in full lines.
template <class C, bool VAR>
KLA_DEVICE void step(const Params& p) {
  using T = typename C::T;
  struct Shared {
    T y[kStepWarps][32], y_var[kStepWarps][32];
  };
  KLA_SHARED(Shared, part);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Int row = blockIdx.x / p.blocks, d = blockIdx.x % p.blocks * 32 + lane;
  const bool inside = d < p.D;
  const auto* mask = static_cast<const unsigned char*>(p.mask.data);
  const bool real = mask == nullptr || mask[row * p.mask.stride_b] != 0;
  const auto token = [&](const Array& x, Int i) {
    return read<T>(x.data, x.dtype, row * x.stride_b + i);
  };
  const T lam_v = inside && real ? token(p.lam_v, d) : T(0);
  const T lv = inside && real ? lam_v * seen<T>(token(p.v, d), lam_v) : T(0);
  T dt = T(0);
  if constexpr (C::kGaps) dt = inside && real ? token(p.dt, d * p.dt_width) : T(0);
  T y = 0, y_var = 0;
  for (Int g = warp; g < p.G && inside; g += kStepWarps) {
    const Int block_at = (row * p.G + g) * p.D + d, first = (row * p.N + g * p.m) * p.D + d;
    T s = static_cast<const T*>(p.variance_0)[block_at];
    Dynamics<T, C::kGaps, 1> dynamics;
    dynamics.a[0] = static_cast<const T*>(p.a_bar)[g * p.D + d];
    dynamics.p[0] = static_cast<const T*>(p.p_bar)[g * p.D + d];
    dynamics.prepare();
    const auto to = dynamics.step(0, dt);
    T k2 = T(0), q2 = T(0);
    if (real)
      for (Int n = g * p.m; n < (g + 1) * p.m; ++n) k2 += token(p.k, n) * token(p.k, n);
    const auto next = variance_step<T>(to.a, to.p, k2 * lam_v, s);
    for (Int n = 0; n < p.m; ++n) {
      T mu = static_cast<const T*>(p.mean_0)[first + n * p.D];
      if (real) {
        const T q = token(p.q, g * p.m + n);
        mu = mean_step<T>(next, to.a * mu, token(p.k, g * p.m + n) * lv);
        y += q * mu;
        q2 += q * q;
      }
      static_cast<T*>(p.mean)[first + n * p.D] = mu;
    }
    if (real) s = next.s;
    if (VAR) y_var += q2 * s;
    static_cast<T*>(p.variance)[block_at] = s;
  }
  part.y[warp][lane] = y;
  part.y_var[warp][lane] = y_var;
  __syncthreads();
  if (warp != 0 || !inside) return;
  for (int w = 1; w < kStepWarps; ++w) {
    y += part.y[w][lane];
    if (VAR) y_var += part.y_var[w][lane];
  }
  write(p.y, p.v.dtype, row * p.D + d, y);
  if (VAR) write(p.y_var, p.v.dtype, row * p.D + d, y_var);
}

}  // namespace kla

using Here = kla::Config<KLA_T, KLA_GROUP, KLA_BLOCKS, KLA_GAPS>;
#define KLA_FORWARD(name, blocks) KLA_KERNEL(name, kla::kForwardThreads, blocks)

KLA_FORWARD(kla_forward, kla::kForwardBlocks<Here>) { kla::forward<Here, false>(p); }
KLA_FORWARD(kla_forward_variance, kla::kForwardBlocks<Here>) { kla::forward<Here, true>(p); }
KLA_FORWARD(kla_summarise, kla::kSummaryBlocks<Here>) { kla::summarise<Here>(p); }
KLA_KERNEL(kla_link, kla::kLinkThreads, 4) { kla::link<KLA_T>(p); }
KLA_KERNEL(kla_step, kla::kStepThreads, kla::kStepBlocks<Here>) { kla::step<Here, false>(p); }
KLA_KERNEL(kla_step_variance, kla::kStepThreads, kla::kStepBlocks<Here>) { kla::step<Here, true>(p); }
