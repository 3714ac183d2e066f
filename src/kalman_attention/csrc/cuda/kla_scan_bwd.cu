// Backward pass. Chunks in reverse, each replayed from its checkpoint and then walked backwards with the
// scalar adjoints of mean and variance. The replay is two levels deep: the beliefs before every kPart-th
// token of a chunk stay in shared memory, those of one part in registers.
//
// Segments are those of the forward pass, walked from the last. The adjoint is linear in what arrives at
// the end of a segment, so the time-split schedule has the same three passes: kla_summarise_back finds a
// segment's affine map, kla_link_back passes adjoints from segment to segment, kla_backward is exact.
//
// Sums over channels (dk, dq) and over segments (da_bar, dp_bar) are written per block and added up in a
// fixed order by the last two kernels: no atomics, the same bits on every run.
#include "lanes.h"

namespace kla {

constexpr int kBackwardSlots = 2;
constexpr int kSumThreads = 128;

// Doubles take twice the room: half the threads, so that shared memory stays below 48 KiB, and half the
// tokens at a time, so that the beliefs of a part stay in registers.
template <class T>
constexpr int kBackwardThreads = sizeof(T) == 8 ? 64 : 128;
template <class T>
constexpr int kPart = sizeof(T) == 8 ? 4 : 8;

template <class T, int GROUP>
using BackwardLanes = Lanes<GROUP, kBackwardSlots, kBackwardThreads<T>>;

// kPart tokens in shared memory, with the gradients by their outputs.
template <class T, int GROUP>
struct Tokens {
  using At = BackwardLanes<T, GROUP>;
  T v[kPart<T>][At::kChannels], lam_v[kPart<T>][At::kChannels];
  T dy[kPart<T>][At::kChannels], dy_var[kPart<T>][At::kChannels];
  T k[kPart<T>][At::kSlots], q[kPart<T>][At::kSlots];
  bool real[kPart<T>];

  KLA_DEVICE void load_evidence(const Params& p, const At& at, Int t) {
    at.stage_values(p, t, v, lam_v);
    at.stage_slots(p, p.k, t, k);
    at.stage_mask(p, t, real);
  }

  template <bool VAR>
  KLA_DEVICE void load_gradients(const Params& p, const At& at, Int t) {
    at.stage_slots(p, p.q, t, q);
    at.stage_channels(p, p.dy, t, dy);
    if (VAR) at.stage_channels(p, p.dy_var, t, dy_var);
  }
};

// The same with what goes out for them, and the beliefs where the parts of the chunk start.
template <class T, int GROUP>
struct Part : Tokens<T, GROUP> {
  using At = BackwardLanes<T, GROUP>;
  using Tokens<T, GROUP>::lam_v;
  using Tokens<T, GROUP>::real;
  T k_db[kPart<T>][At::kChannels], dlam[kPart<T>][At::kChannels];  // sums over slots
  T slots[At::kWarps][kPart<T>][2 * At::kSlots];  // dk, then dq: sums over the channels of a warp
  T starts[kChunk / kPart<T>][2 * kBackwardSlots][kBackwardThreads<T>];

  // dv and dlam_v, or what the slots up to now contribute to the sums they are made of.
  KLA_DEVICE void store_channels(const Params& p, const At& at, Int t) const {
    const bool begun = at.n0 > 0, done = at.n0 + At::kSlots >= p.N;
    T* sums = static_cast<T*>(p.channel_sums);
    KLA_ROLLED
    for (int i = at.thread; i < kPart<T> * At::kChannels; i += kBackwardThreads<T>) {
      const int j = i / At::kChannels, c = i % At::kChannels;
      if (t + j >= at.segment.tokens || at.d0 + c >= p.D) continue;
      const Int here = at.dense(p, t + j) * p.D + at.d0 + c, there = p.B * p.T * p.D + here;
      T db = T(0), sum = T(0);
      if (real[j]) {
        db = k_db[j][c] + (begun ? sums[here] : T(0));
        sum = dlam[j][c] + (begun ? sums[there] : T(0));
      }
      if (done) {
        write(p.dv, p.v.dtype, here, real[j] ? lam_v[j][c] * db : T(0));
        write(p.dlam_v, p.lam_v.dtype, here, sum);
      } else {
        sums[here] = db;
        sums[there] = sum;
      }
    }
  }

  // dk and dq, summed over the channels of the block.
  KLA_DEVICE void store_slots(const Params& p, const At& at, Int t) const {
    const Int block = at.d0 / At::kChannels - p.block0;
    T* parts = static_cast<T*>(p.slot_parts) + block * p.B * p.T * 2 * At::kSlots;
    KLA_ROLLED
    for (int i = at.thread; i < kPart<T> * 2 * At::kSlots; i += kBackwardThreads<T>) {
      const int j = i / (2 * At::kSlots), n = i % (2 * At::kSlots);
      if (t + j >= at.segment.tokens) continue;
      T sum = T(0);
      if (real[j])
        for (int w = 0; w < At::kWarps; ++w) sum += slots[w][j][n];
      parts[at.dense(p, t + j) * 2 * At::kSlots + n] = sum;
    }
  }
};

// The lanes of one thread: beliefs, their adjoints, and what it collects.
template <class T>
struct Backward {
  static constexpr int S = kBackwardSlots;
  T a[S], pb[S], s[S], mu[S];
  T dmu[S], ds[S];  // adjoint of the belief
  T da[S], dp[S];   // of the current chunk
};

// What the adjoint needs of each step of a part: beliefs before and after, and r.
template <class T>
struct Path {
  T s[kPart<T> + 1][kBackwardSlots], mu[kPart<T> + 1][kBackwardSlots], r[kPart<T>][kBackwardSlots];

  // The adjoint before step j of slot i, and what its inputs get, from the adjoint after it.
  KLA_DEVICE FilterGrad<T> back(int j, int i, T a, T k, T v, T lam_v, T dmu, T ds) const {
    const FilterStep<T> next = {s[j + 1][i], mu[j + 1][i], r[j][i]};
    const T rest = remainder<T>(k, v, a * mu[j][i], next.r);
    return filter_adjoint<T>(a, k, k * k, lam_v, s[j][i], mu[j][i], next, rest, dmu, ds);
  }
};

// Repeats the steps of one part.
template <class T, int GROUP>
KLA_DEVICE void replay(const Part<T, GROUP>& part, const BackwardLanes<T, GROUP>& at, Backward<T>& x) {
  for (int j = 0; j < kPart<T>; ++j) {
    if (!part.real[j]) continue;
    const T lam_v = part.lam_v[j][at.channel], lv = lam_v * part.v[j][at.channel];
    for (int i = 0; i < kBackwardSlots; ++i) {
      const T k = part.k[j][at.slot + i];
      const auto next = filter_step<T>(x.a[i], x.pb[i], k * k * lam_v, k * lv, x.s[i], x.mu[i]);
      x.s[i] = next.s;
      x.mu[i] = next.mu;
    }
  }
}

template <class T, int GROUP>
KLA_DEVICE void replay_path(const Part<T, GROUP>& part, const BackwardLanes<T, GROUP>& at,
                            const Backward<T>& x, Path<T>& path) {
  for (int i = 0; i < kBackwardSlots; ++i) {
    path.s[0][i] = x.s[i];
    path.mu[0][i] = x.mu[i];
  }
  KLA_UNROLL
  for (int j = 0; j < kPart<T>; ++j) {
    const bool real = part.real[j];
    const T lam_v = part.lam_v[j][at.channel], lv = lam_v * part.v[j][at.channel];
    KLA_UNROLL
    for (int i = 0; i < kBackwardSlots; ++i) {
      const T k = part.k[j][at.slot + i];
      const T s = path.s[j][i], mu = path.mu[j][i];
      const auto next = filter_step<T>(x.a[i], x.pb[i], k * k * lam_v, k * lv, s, mu);
      path.s[j + 1][i] = real ? next.s : s;
      path.mu[j + 1][i] = real ? next.mu : mu;
      path.r[j][i] = next.r;
    }
  }
}

// Walks one part backwards with the adjoints, and collects what every input gets.
template <class T, int GROUP, bool VAR>
KLA_DEVICE void adjoint(Part<T, GROUP>& part, const BackwardLanes<T, GROUP>& at, const Path<T>& path,
                        Backward<T>& x) {
  using At = BackwardLanes<T, GROUP>;
  using OverSlots = WarpSum<2, At::kWide, 32>;
  using OverChannels = WarpSum<2 * kBackwardSlots, 1, At::kWide>;
  KLA_UNROLL
  for (int j = kPart<T> - 1; j >= 0; --j) {
    if (!part.real[j]) continue;
    const T lam_v = part.lam_v[j][at.channel], v = part.v[j][at.channel];
    const T dy = part.dy[j][at.channel], dy_var = VAR ? part.dy_var[j][at.channel] : T(0);
    T over_slots[2] = {T(0), T(0)};        // sums of k db and dlam_v
    T over_channels[2 * kBackwardSlots];   // dk, then dq
    KLA_UNROLL
    for (int i = 0; i < kBackwardSlots; ++i) {
      const T k = part.k[j][at.slot + i], q = part.q[j][at.slot + i], s_new = path.s[j + 1][i];
      const T dmu = x.dmu[i] + q * dy, ds = VAR ? x.ds[i] + q * q * dy_var : x.ds[i];
      const auto g = path.back(j, i, x.a[i], k, v, lam_v, dmu, ds);
      x.dmu[i] = g.dmu;
      x.ds[i] = g.ds;
      x.da[i] += g.da;
      x.dp[i] += g.dp;
      over_slots[0] += k * g.db;
      over_slots[1] += g.dlam_v;
      over_channels[i] = lam_v * (v * g.db + 2 * k * g.dphi);
      over_channels[kBackwardSlots + i] = dy * path.mu[j + 1][i];
      if (VAR) over_channels[kBackwardSlots + i] += 2 * q * (dy_var * s_new);
    }
    int first = OverSlots::run(over_slots, at.lane);
    if (OverSlots::owner(at.lane)) {
      if (first == 0) part.k_db[j][at.channel] = over_slots[0];
      if (first + OverSlots::kKept == 2) part.dlam[j][at.channel] = over_slots[1 - first];
    }
    first = OverChannels::run(over_channels, at.lane);
    if (OverChannels::owner(at.lane))
      for (int f = 0; f < OverChannels::kKept; ++f) {
        const int which = (first + f) / kBackwardSlots, i = (first + f) % kBackwardSlots;
        part.slots[at.warp][j][which * At::kSlots + at.slot + i] = over_channels[f];
      }
  }
}

// One chunk: beliefs where its parts start, then part after part from the last.
template <class T, int GROUP, bool VAR>
KLA_DEVICE void chunk_back(const Params& p, const BackwardLanes<T, GROUP>& at, Int t,
                           Part<T, GROUP>& part, Backward<T>& x) {
  const Segment& seg = at.segment;
  const int tokens = static_cast<int>(seg.tokens - t < kChunk ? seg.tokens - t : kChunk);
  const int last = (tokens - 1) / kPart<T>;
  at.load(p, p.checkpoints, seg.chunk + t / kChunk, x.mu);
  at.load(p, p.checkpoints, p.chunks + seg.chunk + t / kChunk, x.s);
  for (int h = 0;; ++h) {
    for (int i = 0; i < kBackwardSlots; ++i) {
      part.starts[h][i][at.thread] = x.s[i];
      part.starts[h][kBackwardSlots + i][at.thread] = x.mu[i];
    }
    if (h == last) break;
    part.load_evidence(p, at, t + h * kPart<T>);
    __syncthreads();
    replay<T, GROUP>(part, at, x);
    __syncthreads();
  }
  for (int h = last; h >= 0; --h) {
    part.load_evidence(p, at, t + h * kPart<T>);
    part.template load_gradients<VAR>(p, at, t + h * kPart<T>);
    for (int i = 0; i < kBackwardSlots; ++i) {
      x.s[i] = part.starts[h][i][at.thread];
      x.mu[i] = part.starts[h][kBackwardSlots + i][at.thread];
    }
    __syncthreads();
    Path<T> path;
    replay_path<T, GROUP>(part, at, x, path);
    __syncwarp();  // or the compiler keeps the evidence of both walks in registers, and spills
    adjoint<T, GROUP, VAR>(part, at, path, x);
    __syncthreads();
    part.store_channels(p, at, t + h * kPart<T>);
    part.store_slots(p, at, t + h * kPart<T>);
    __syncthreads();
  }
}

// Gradients of one segment.
template <class T, int GROUP, bool VAR>
KLA_DEVICE void backward(const Params& p) {
  using Shared = Part<T, GROUP>;
  KLA_SHARED(Shared, part);
  const BackwardLanes<T, GROUP> at(p);
  const Segment& seg = at.segment;
  T da[kBackwardSlots] = {}, dp[kBackwardSlots] = {};
  if (seg.used) {
    Backward<T> x;
    at.load(p, p.a_bar, 0, x.a);
    at.load(p, p.p_bar, 0, x.pb);
    at.load(p, seg.last ? p.dmean : p.borders, seg.last ? seg.row : at.number, x.dmu);
    at.load(p, seg.last ? p.dvariance : p.borders, seg.last ? seg.row : p.segments + at.number, x.ds);
    for (Int t = (seg.tokens - 1) / kChunk * kChunk; seg.tokens > 0 && t >= 0; t -= kChunk) {
      for (int i = 0; i < kBackwardSlots; ++i) x.da[i] = x.dp[i] = T(0);
      chunk_back<T, GROUP, VAR>(p, at, t, part, x);
      for (int i = 0; i < kBackwardSlots; ++i) {
        da[i] += x.da[i];
        dp[i] += x.dp[i];
      }
    }
    if (seg.first) {
      at.store(p, p.dmean_0, seg.row, x.dmu);
      at.store(p, p.dvariance_0, seg.row, x.ds);
    }
  }
  at.store(p, p.dynamics_parts, at.number, da);
  at.store(p, p.dynamics_parts, p.segments + at.number, dp);
}

// What a segment does to the adjoint that arrives at its end: four numbers per lane, found in one walk
// forward. The first segment of a row needs none.
template <class T, int GROUP, bool VAR>
KLA_DEVICE void summarise_back(const Params& p) {
  using Shared = Tokens<T, GROUP>;
  KLA_SHARED(Shared, tokens);
  const BackwardLanes<T, GROUP> at(p);
  const Segment& seg = at.segment;
  if (!seg.used || seg.first) return;
  T a[kBackwardSlots], pb[kBackwardSlots], s[kBackwardSlots], mu[kBackwardSlots];
  at.load(p, p.a_bar, 0, a);
  at.load(p, p.p_bar, 0, pb);
  AdjointMap<T> map[kBackwardSlots];
  for (int i = 0; i < kBackwardSlots; ++i) map[i] = adjoint_identity<T>();
  for (Int t = 0; t < seg.tokens; t += kPart<T>) {
    if (t % kChunk == 0) {
      at.load(p, p.checkpoints, seg.chunk + t / kChunk, mu);
      at.load(p, p.checkpoints, p.chunks + seg.chunk + t / kChunk, s);
    }
    tokens.load_evidence(p, at, t);
    tokens.template load_gradients<VAR>(p, at, t);
    __syncthreads();
    for (int j = 0; j < kPart<T>; ++j) {
      if (!tokens.real[j]) continue;
      const T lam_v = tokens.lam_v[j][at.channel], lv = lam_v * tokens.v[j][at.channel];
      const T dy = tokens.dy[j][at.channel], dy_var = VAR ? tokens.dy_var[j][at.channel] : T(0);
      KLA_UNROLL
      for (int i = 0; i < kBackwardSlots; ++i) {
        const T k = tokens.k[j][at.slot + i], q = tokens.q[j][at.slot + i];
        const T phi = k * k * lam_v, b = k * lv;
        const T e = innovation<T>(phi, b, a[i] * mu[i]);
        const auto next = filter_step<T>(a[i], pb[i], phi, b, s[i], mu[i]);
        s[i] = next.s;
        mu[i] = next.mu;
        map[i] = then_token<T>(map[i], a[i], next.r, e, q * dy, q * q * dy_var);
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < kBackwardSlots; ++i) {
    if (!at.exists(p, i)) continue;
    const T entries[4] = {map[i].gain, map[i].cross, map[i].dmu_0, map[i].ds_0};
    for (int f = 0; f < 4; ++f)
      static_cast<T*>(p.summaries)[at.at(p, f * p.segments + at.number, i)] = entries[f];
  }
}

// Passes the adjoint of every lane from segment to segment, from the last; one thread per lane.
template <class T>
KLA_DEVICE void link_back(const Params& p) {
  const Int lanes = p.N * p.D, field = p.segments * lanes;
  const Int index = static_cast<Int>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (index >= p.R * lanes) return;
  const Int row = index / lanes, lane = index % lanes, number = first_segment(p, row);
  T* borders = static_cast<T*>(p.borders);
  T dmu = p.dmean ? static_cast<const T*>(p.dmean)[index] : T(0);
  T ds = p.dvariance ? static_cast<const T*>(p.dvariance)[index] : T(0);
  for (Int i = number + count_segments(p, row) - 1; i > number; --i) {
    const T* m = static_cast<const T*>(p.summaries) + i * lanes + lane;
    apply<T>(AdjointMap<T>{m[0], m[field], m[2 * field], m[3 * field]}, ds, dmu);
    borders[(i - 1) * lanes + lane] = dmu;
    borders[field + (i - 1) * lanes + lane] = ds;
  }
}

// dk and dq from the sums of the channel blocks, block after block.
template <class T, int GROUP>
KLA_DEVICE void sum_slots(const Params& p) {
  constexpr int SLOTS = BackwardLanes<T, GROUP>::kSlots, kChannels = BackwardLanes<T, GROUP>::kChannels;
  const Int index = static_cast<Int>(blockIdx.x) * kSumThreads + threadIdx.x;
  const Int tokens = p.B * p.T, block = tokens * 2 * SLOTS;
  if (index >= block) return;
  const Int token = index / (2 * SLOTS), which = index / SLOTS % 2, n = p.n0 + index % SLOTS;
  if (n >= p.N) return;
  T* earlier = static_cast<T*>(p.slot_sums) + (which * tokens + token) * p.N + n;
  T sum = p.block0 > 0 ? *earlier : T(0);
  for (Int i = 0; i < p.blocks; ++i) sum += static_cast<const T*>(p.slot_parts)[i * block + index];
  if ((p.block0 + p.blocks) * kChannels < p.D) *earlier = sum;
  else write(which == 0 ? p.dk : p.dq, which == 0 ? p.k.dtype : p.q.dtype, token * p.N + n, sum);
}

// da_bar and dp_bar from the sums of the segments, one after another.
template <class T>
KLA_DEVICE void sum_dynamics(const Params& p) {
  const Int lanes = p.N * p.D, index = static_cast<Int>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (index >= lanes) return;
  const T* parts = static_cast<const T*>(p.dynamics_parts) + index;
  double da = 0, dp = 0;
  for (Int i = 0; i < p.segments; ++i) {
    da += parts[i * lanes];
    dp += parts[(p.segments + i) * lanes];
  }
  static_cast<T*>(p.da_bar)[index] = static_cast<T>(da);
  static_cast<T*>(p.dp_bar)[index] = static_cast<T>(dp);
}

}  // namespace kla

#define KLA_BACKWARD(name, blocks) KLA_KERNEL(name, kla::kBackwardThreads<KLA_T>, blocks)

KLA_BACKWARD(kla_backward, 4) { kla::backward<KLA_T, KLA_GROUP, false>(p); }
KLA_BACKWARD(kla_backward_variance, 4) { kla::backward<KLA_T, KLA_GROUP, true>(p); }
KLA_BACKWARD(kla_summarise_back, 3) { kla::summarise_back<KLA_T, KLA_GROUP, false>(p); }
KLA_BACKWARD(kla_summarise_back_variance, 3) { kla::summarise_back<KLA_T, KLA_GROUP, true>(p); }
KLA_KERNEL(kla_link_back, kla::kSumThreads, 4) { kla::link_back<KLA_T>(p); }
KLA_KERNEL(kla_sum_slots, kla::kSumThreads, 8) { kla::sum_slots<KLA_T, KLA_GROUP>(p); }
KLA_KERNEL(kla_sum_dynamics, kla::kSumThreads, 8) { kla::sum_dynamics<KLA_T>(p); }
