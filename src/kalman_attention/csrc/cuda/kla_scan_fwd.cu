// Forward pass. A block owns the lanes of some channels of one segment and walks time; beliefs stay in
// registers, tokens pass through shared memory. With one segment per row that is the lane-serial
// schedule. The time-split schedule cuts rows into more segments: kla_summarise finds what each does to
// any belief, kla_link passes beliefs from segment to segment, then kla_forward replays them all exactly.
//
// Compiled once per arithmetic type (KLA_T) and number of threads per channel (KLA_GROUP).
#include "lanes.h"

namespace kla {

constexpr int kForwardThreads = 128, kForwardSlots = 4, kLinkThreads = 128;
constexpr int kStepThreads = 128, kStepWarps = kStepThreads / 32;
// Blocks per multiprocessor: as many as the registers allow without spills.
template <class T>
constexpr int kForwardBlocks = sizeof(T) == 8 ? 3 : 8;
template <class T>
constexpr int kSummaryBlocks = sizeof(T) == 8 ? 2 : 4;
template <class T>
constexpr int kStepBlocks = sizeof(T) == 8 ? 6 : 8;

template <int GROUP>
using ForwardLanes = Lanes<GROUP, kForwardSlots, kForwardThreads>;

template <class T, int GROUP>
struct Tile {
  static constexpr int kTokens = sizeof(T) == 8 ? 16 : 32;
  using At = ForwardLanes<GROUP>;

  // lam_v v becomes y and lam_v becomes y_var. That needs no barrier: the threads of a channel are in
  // one warp, and a sum over them is complete only after all of them have read what it is made of.
  T lv_y[kTokens][At::kChannels];
  T lam_v_y_var[kTokens][At::kChannels];
  T k[kTokens][At::kSlots], q[kTokens][At::kSlots];
  bool real[kTokens];

  KLA_DEVICE void load(const Params& p, const At& at, Int t) {
    at.stage_values(p, t, lv_y, lam_v_y_var);
    KLA_ROLLED
    for (int i = at.thread; i < kTokens * At::kChannels; i += kForwardThreads)
      lv_y[i / At::kChannels][i % At::kChannels] *= lam_v_y_var[i / At::kChannels][i % At::kChannels];
    at.stage_slots(p, p.k, t, k);
    at.stage_mask(p, t, real);
  }

  // Stores y and y_var, or what the slots up to now contribute to them.
  template <bool VAR>
  KLA_DEVICE void store(const Params& p, const At& at, Int t) const {
    const bool begun = at.n0 > 0, done = at.n0 + At::kSlots >= p.N;
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
template <class T, int GROUP, bool VAR>
KLA_DEVICE void forward(const Params& p) {
  using At = ForwardLanes<GROUP>;
  using Shared = Tile<T, GROUP>;
  using Sum = WarpSum<VAR ? 2 : 1, At::kWide, 32>;
  KLA_SHARED(Shared, tile);
  const At at(p);
  const Segment& seg = at.segment;
  if (!seg.used) return;
  T a[kForwardSlots], pb[kForwardSlots], s[kForwardSlots], mu[kForwardSlots];
  at.load(p, p.a_bar, 0, a);
  at.load(p, p.p_bar, 0, pb);
  at.load(p, seg.first ? p.mean_0 : p.borders, seg.first ? seg.row : at.number, mu);
  at.load(p, seg.first ? p.variance_0 : p.borders, seg.first ? seg.row : p.segments + at.number, s);
  for (Int t = 0; t < seg.tokens; t += Shared::kTokens) {
    if (p.checkpoints != nullptr && t % kChunk == 0) {
      at.store(p, p.checkpoints, seg.chunk + t / kChunk, mu);
      at.store(p, p.checkpoints, p.chunks + seg.chunk + t / kChunk, s);
    }
    tile.load(p, at, t);
    at.stage_slots(p, p.q, t, tile.q);
    __syncthreads();
    for (int j = 0; j < Shared::kTokens && t + j < seg.tokens; ++j) {
      T out[2] = {T(0), T(0)};  // y, y_var
      if (tile.real[j]) {
        const T lam_v = tile.lam_v_y_var[j][at.channel], lv = tile.lv_y[j][at.channel];
        KLA_UNROLL
        for (int i = 0; i < kForwardSlots; ++i) {
          const T k = tile.k[j][at.slot + i], q = tile.q[j][at.slot + i];
          const auto next = filter_step<T>(a[i], pb[i], k * k * lam_v, k * lv, s[i], mu[i]);
          s[i] = next.s;
          mu[i] = next.mu;
          out[0] += q * next.mu;
          if (VAR) out[1] += q * q * next.s;
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
    at.store(p, p.variance, seg.row, s);
  }
}

// What a segment does to any belief, as five numbers per lane. The last segment of a row needs none.
template <class T, int GROUP>
KLA_DEVICE void summarise(const Params& p) {
  using At = ForwardLanes<GROUP>;
  using Shared = Tile<T, GROUP>;
  KLA_SHARED(Shared, tile);
  const At at(p);
  const Segment& seg = at.segment;
  if (!seg.used || seg.last) return;
  T a[kForwardSlots], pb[kForwardSlots];
  at.load(p, p.a_bar, 0, a);
  at.load(p, p.p_bar, 0, pb);
  FilterMap<T> map[kForwardSlots];
  for (int i = 0; i < kForwardSlots; ++i) map[i] = filter_identity<T>();
  for (Int t = 0; t < seg.tokens; t += Shared::kTokens) {
    tile.load(p, at, t);
    __syncthreads();
    for (int j = 0; j < Shared::kTokens && t + j < seg.tokens; ++j) {
      if (!tile.real[j]) continue;
      const T lam_v = tile.lam_v_y_var[j][at.channel], lv = tile.lv_y[j][at.channel];
      KLA_UNROLL
      for (int i = 0; i < kForwardSlots; ++i) {
        const T k = tile.k[j][at.slot + i];
        map[i] = then_token<T>(map[i], a[i], pb[i], k * k * lam_v, k * lv);
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < kForwardSlots; ++i) {
    if (!at.exists(p, i)) continue;
    const T entries[5] = {map[i].s, map[i].mu, map[i].gain, map[i].J, map[i].eta};
    for (int f = 0; f < 5; ++f)
      static_cast<T*>(p.summaries)[at.at(p, f * p.segments + at.number, i)] = entries[f];
  }
}

// Passes the belief of every lane from segment to segment; one thread per lane.
template <class T>
KLA_DEVICE void link(const Params& p) {
  const Int lanes = p.N * p.D, field = p.segments * lanes;
  const Int index = static_cast<Int>(blockIdx.x) * kLinkThreads + threadIdx.x;
  if (index >= p.R * lanes) return;
  const Int row = index / lanes, lane = index % lanes;
  const Int number = first_segment(p, row), count = count_segments(p, row);
  const T* maps = static_cast<const T*>(p.summaries);
  T* borders = static_cast<T*>(p.borders);
  T s = static_cast<const T*>(p.variance_0)[index], mu = static_cast<const T*>(p.mean_0)[index];
  for (Int i = number; i + 1 < number + count; ++i) {
    const T* m = maps + i * lanes + lane;
    apply<T>(FilterMap<T>{m[0], m[field], m[2 * field], m[3 * field], m[4 * field]}, s, mu);
    borders[(i + 1) * lanes + lane] = mu;
    borders[field + (i + 1) * lanes + lane] = s;
  }
}

// One token per row: v, lam_v [R, D] and k, q [R, N]. A warp takes 32 channels and every kStepWarps-th
// slot, so that the [N, D] arrays are streamed once, in full lines.
template <class T, bool VAR>
KLA_DEVICE void step(const Params& p) {
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
  T y = 0, y_var = 0;
  for (Int n = warp; n < p.N && inside; n += kStepWarps) {
    const Int lane_at = n * p.D + d, at = row * p.N * p.D + lane_at;
    T s = static_cast<const T*>(p.variance_0)[at], mu = static_cast<const T*>(p.mean_0)[at];
    if (real) {
      const T k = token(p.k, n), q = token(p.q, n);
      const T a = static_cast<const T*>(p.a_bar)[lane_at], pb = static_cast<const T*>(p.p_bar)[lane_at];
      const auto next = filter_step<T>(a, pb, k * k * lam_v, k * lv, s, mu);
      s = next.s;
      mu = next.mu;
      y += q * mu;
      if (VAR) y_var += q * q * s;
    }
    static_cast<T*>(p.variance)[at] = s;
    static_cast<T*>(p.mean)[at] = mu;
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

#define KLA_FORWARD(name, blocks) KLA_KERNEL(name, kla::kForwardThreads, blocks)

KLA_FORWARD(kla_forward, kla::kForwardBlocks<KLA_T>) { kla::forward<KLA_T, KLA_GROUP, false>(p); }
KLA_FORWARD(kla_forward_variance, kla::kForwardBlocks<KLA_T>) { kla::forward<KLA_T, KLA_GROUP, true>(p); }
KLA_FORWARD(kla_summarise, kla::kSummaryBlocks<KLA_T>) { kla::summarise<KLA_T, KLA_GROUP>(p); }
KLA_KERNEL(kla_link, kla::kLinkThreads, 4) { kla::link<KLA_T>(p); }
KLA_KERNEL(kla_step, kla::kStepThreads, kla::kStepBlocks<KLA_T>) { kla::step<KLA_T, false>(p); }
KLA_KERNEL(kla_step_variance, kla::kStepThreads, kla::kStepBlocks<KLA_T>) { kla::step<KLA_T, true>(p); }
