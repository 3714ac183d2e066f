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

constexpr int kSumThreads = 128;

// With shared variances a thread has fewer of them than slots, so more slots fit into its registers. A block of
// threads has at most 64 slots, because their sums over channels take shared memory.
template <class C>
constexpr int kBackwardSlots = C::kShared && !C::kDouble ? 4 : 2;
// Doubles take twice the memory: half the threads, so that shared memory stays below 48 KiB, and half the tokens
// at a time, so that the beliefs of a part stay in registers. kPart is the square root of a chunk: the beliefs
// before the parts and those of one part are fewest then.
template <class C>
constexpr int kBackwardThreads = C::kDouble ? 64 : 128;
template <class C>
constexpr int kPart = C::kDouble ? 4 : 8;
template <class C>
constexpr int kBackwardBlocks = C::kGaps ? 3 : C::kShared ? 2 : 4;

template <class C>
using BackwardLanes = Lanes<C, kBackwardSlots<C>, kBackwardThreads<C>>;

// kPart tokens in shared memory, with the gradients with respect to their outputs. In the exact pass dy becomes
// the sum of k db over slots, v that of dlam_v and dt that of ddt, as lam_v v becomes y in the forward pass.
template <class C>
struct Tokens {
  using T = typename C::T;
  using At = BackwardLanes<C>;
  static constexpr int kRows = kPart<C>;
  T v_dlam[kRows][At::kChannels], lam_v[kRows][At::kChannels];
  T dy_db[kRows][At::kChannels], dy_var[kRows][At::kChannels];
  T dt_ddt[C::kGaps ? kRows : 1][At::kChannels];
  T k[kRows][At::kSlots], q[kRows][At::kSlots];
  T k2[kRows][At::kBlocks], q2[kRows][At::kBlocks];
  bool real[kRows];

  KLA_DEVICE void load_evidence(const Params& p, const At& at, Int t) {
    at.stage_values(p, t, v_dlam, lam_v);
    if constexpr (C::kGaps) at.stage_channels(p, p.dt, t, dt_ddt, p.dt_width);
    at.stage_slots(p, p.k, t, k);
    at.stage_squares(p, p.k, t, k2);
    at.stage_mask(p, t, real);
  }

  template <bool VAR>
  KLA_DEVICE void load_gradients(const Params& p, const At& at, Int t) {
    at.stage_slots(p, p.q, t, q);
    at.stage_channels(p, p.dy, t, dy_db);
    if (VAR) at.stage_channels(p, p.dy_var, t, dy_var);
    if (VAR) at.stage_squares(p, p.q, t, q2);
  }

  KLA_DEVICE T gap(const At& at, int j) const { return C::kGaps ? dt_ddt[C::kGaps ? j : 0][at.channel] : T(0); }

  // |k|^2 or |q|^2 of the block of slots that variance o of a thread belongs to.
  KLA_DEVICE T square(const At& at, int j, int o, const T (&one)[kRows][At::kSlots],
                      const T (&blocks)[kRows][At::kBlocks]) const {
    if constexpr (C::kShared) return blocks[j][at.block];
    return one[j][at.slot + o] * one[j][at.slot + o];
  }
  KLA_DEVICE T key(const At& at, int j, int o) const { return square(at, j, o, k, k2); }
  KLA_DEVICE T query(const At& at, int j, int o) const { return square(at, j, o, q, q2); }
};

// The same with what goes out for slots, and the beliefs where the parts of the chunk start.
template <class C>
struct Part : Tokens<C> {
  using T = typename C::T;
  using At = BackwardLanes<C>;
  static constexpr int kRows = kPart<C>, S = kBackwardSlots<C>, O = At::kOwn;
  T slots[At::kWarps][kRows][2 * At::kSlots];  // dk, then dq: sums over the channels of a warp
  T starts[kChunk / kRows][O + S][kBackwardThreads<C>];

  // dv, dlam_v and ddt, or what the slots up to now contribute to the sums they are made of.
  KLA_DEVICE void store_channels(const Params& p, const At& at, Int t) const {
    const bool begun = at.n0 > 0, done = at.n0 + At::kSlots >= p.G * p.places;
    const Int field = p.B * p.T * p.D;
    T* sums = static_cast<T*>(p.channel_sums);
    KLA_ROLLED
    for (int i = at.thread; i < kRows * At::kChannels; i += kBackwardThreads<C>) {
      const int j = i / At::kChannels, c = i % At::kChannels;
      if (t + j >= at.segment.tokens || at.d0 + c >= p.D) continue;
      const Int here = at.dense(p, t + j) * p.D + at.d0 + c;
      const bool real = this->real[j];
      const auto total = [&](int f, T x) { return real ? x + (begun ? sums[f * field + here] : T(0)) : T(0); };
      const T db = total(0, this->dy_db[j][c]), dlam = total(1, this->v_dlam[j][c]);
      const T ddt = C::kGaps ? total(2, this->dt_ddt[C::kGaps ? j : 0][c]) : T(0);
      if (done) {
        write(p.dv, p.v.dtype, here, real ? this->lam_v[j][c] * db : T(0));
        write(p.dlam_v, p.lam_v.dtype, here, dlam);
        if (C::kGaps) static_cast<T*>(p.ddt)[here] = ddt;
      } else {
        sums[here] = db;
        sums[field + here] = dlam;
        if (C::kGaps) sums[2 * field + here] = ddt;
      }
    }
  }

  // dk and dq, summed over the channels of the block.
  KLA_DEVICE void store_slots(const Params& p, const At& at, Int t) const {
    const Int block = at.d0 / At::kChannels - p.block0;
    T* parts = static_cast<T*>(p.slot_parts) + block * p.B * p.T * 2 * At::kSlots;
    KLA_ROLLED
    for (int i = at.thread; i < kRows * 2 * At::kSlots; i += kBackwardThreads<C>) {
      const int j = i / (2 * At::kSlots), n = i % (2 * At::kSlots);
      if (t + j >= at.segment.tokens) continue;
      T sum = T(0);
      if (this->real[j])
        for (int w = 0; w < At::kWarps; ++w) sum += slots[w][j][n];
      parts[at.dense(p, t + j) * 2 * At::kSlots + n] = sum;
    }
  }
};

// The lanes of one thread: beliefs, their adjoints, and what it collects.
template <class C>
struct Backward {
  using T = typename C::T;
  static constexpr int S = kBackwardSlots<C>, O = BackwardLanes<C>::kOwn;
  typename BackwardLanes<C>::Own dynamics;
  T s[O], mu[S];
  T ds[O], dmu[S];  // adjoint of the belief
  T da[O], dp[O];   // of the current chunk
};

// What the adjoint needs of each step of a part: beliefs before and after, and r.
template <class C>
struct Path {
  using T = typename C::T;
  static constexpr int S = kBackwardSlots<C>, O = BackwardLanes<C>::kOwn;
  T s[kPart<C> + 1][O], mu[kPart<C> + 1][S], r[kPart<C>][O];
};

// Repeats the step to token j of a part, from the belief (s, mu).
template <class C>
KLA_DEVICE void repeat(const Tokens<C>& tokens, const BackwardLanes<C>& at, const Backward<C>& x, int j,
                       const typename C::T (&s)[Backward<C>::O], const typename C::T (&mu)[Backward<C>::S],
                       typename C::T (&s_new)[Backward<C>::O], typename C::T (&mu_new)[Backward<C>::S],
                       typename C::T (&r)[Backward<C>::O]) {
  using T = typename C::T;
  const T lam_v = tokens.lam_v[j][at.channel], lv = lam_v * tokens.v_dlam[j][at.channel];
  const T dt = tokens.gap(at, j);
  KLA_UNROLL
  for (int o = 0; o < Backward<C>::O; ++o) {
    const auto to = x.dynamics.step(o, dt);
    const auto next = variance_step<T>(to.a, to.p, tokens.key(at, j, o) * lam_v, s[o]);
    s_new[o] = next.s;
    r[o] = next.r;
    KLA_UNROLL
    for (int i = o; i < (C::kShared ? Backward<C>::S : o + 1); ++i)
      mu_new[i] = mean_step<T>(next, to.a * mu[i], tokens.k[j][at.slot + i] * lv);
  }
}

template <class C>
KLA_DEVICE void replay(const Part<C>& part, const BackwardLanes<C>& at, Backward<C>& x) {
  typename C::T r[Backward<C>::O];
  for (int j = 0; j < kPart<C>; ++j)
    if (part.real[j]) repeat<C>(part, at, x, j, x.s, x.mu, x.s, x.mu, r);
}

template <class C>
KLA_DEVICE void replay_path(const Part<C>& part, const BackwardLanes<C>& at, const Backward<C>& x,
                            Path<C>& path) {
  for (int o = 0; o < Backward<C>::O; ++o) path.s[0][o] = x.s[o];
  for (int i = 0; i < Backward<C>::S; ++i) path.mu[0][i] = x.mu[i];
  KLA_UNROLL
  for (int j = 0; j < kPart<C>; ++j) {
    repeat<C>(part, at, x, j, path.s[j], path.mu[j], path.s[j + 1], path.mu[j + 1], path.r[j]);
    const bool real = part.real[j];
    for (int o = 0; o < Backward<C>::O; ++o)
      if (!real) path.s[j + 1][o] = path.s[j][o];
    for (int i = 0; i < Backward<C>::S; ++i)
      if (!real) path.mu[j + 1][i] = path.mu[j][i];
  }
}

// Gradients of decay, noise and gap of one step. s is the variance before it and mu_g the sum of mu dm over slots,
// where dm is the adjoint of the predicted mean; dP is that of the predicted variance, 0 in all but one thread of
// a block.
template <class T, int O>
KLA_DEVICE void dynamics_back(const Dynamics<T, false, O>& x, int o, T, T s, T mu_g, T dP, T& da, T& dp, T&) {
  const T a_dP = x.a[o] * dP;
  da += mu_g + s * (a_dP + a_dP);
  dp += dP;
}

template <class T, int O>
KLA_DEVICE void dynamics_back(const Dynamics<T, true, O>& x, int o, T dt, T s, T mu_g, T dP, T& dL, T& dp,
                              T& ddt) {
  const Gap<T> gap = x.over(o, dt), one = x.over(o, T(1));
  const T a = gap.decay(), L = x.a[o];
  const T share = x.unit[o] * gap.h, left_1 = one.decay() * one.decay();
  // How the noise p_bar h(dt) / h(1) falls with 2 L; nothing for a gap of one unit. Of a fast rate both moments
  // are nearly h / (2 L), which cancels.
  const T slow = gap_moment<T>(L, x.half[o], dt, gap) - gap_moment<T>(L, x.half[o], T(1), one) * share;
  const T fall = L > T(kFastRate) ? x.half[o] * (left_1 * share - dt * (a * a)) : slow;
  dL -= dt * (a * mu_g) + 2 * dP * (s * (dt * (a * a)) + x.p[o] * fall);
  dp += share * dP;
  ddt += a * (a * ((x.p[o] - 2 * L * s) * dP)) - L * (a * mu_g);
}

// Walks one part backwards with the adjoints, and collects all gradients.
template <class C, bool VAR>
KLA_DEVICE void adjoint(Part<C>& part, const BackwardLanes<C>& at, const Path<C>& path, Backward<C>& x) {
  using T = typename C::T;
  using At = BackwardLanes<C>;
  constexpr int S = kBackwardSlots<C>, O = At::kOwn;
  using OverSlots = WarpSum<2, At::kWide, 32>;
  using OverGaps = WarpSum<1, At::kWide, 32>;
  using OverChannels = WarpSum<2 * S, 1, At::kWide>;
  KLA_UNROLL
  for (int j = kPart<C> - 1; j >= 0; --j) {
    if (!part.real[j]) continue;
    const T lam_v = part.lam_v[j][at.channel], v = part.v_dlam[j][at.channel], dt = part.gap(at, j);
    const T dy = part.dy_db[j][at.channel], dy_var = VAR ? part.dy_var[j][at.channel] : T(0);
    T over_slots[2] = {T(0), T(0)};  // sums of k db and dlam_v
    T ddt[1] = {T(0)};
    T over_channels[2 * S];          // dk, then dq
    KLA_UNROLL
    for (int o = 0; o < O; ++o) {
      const int end = C::kShared ? S : o + 1;
      const auto to = x.dynamics.step(o, dt);
      const T k2 = part.key(at, j, o), s_new = path.s[j + 1][o], r = path.r[j][o];
      const T ds = VAR ? x.ds[o] + part.query(at, j, o) * dy_var : x.ds[o];
      T dmu[S], rest_dmu = T(0), mu_dmu = T(0), mu_g = T(0);
      KLA_UNROLL
      for (int i = o; i < end; ++i) {
        const T k = part.k[j][at.slot + i], m = to.a * path.mu[j][i];
        dmu[i] = x.dmu[i] + part.q[j][at.slot + i] * dy;
        if constexpr (C::kShared) rest_dmu += block_remainder<T>(k, k2, v, m, r) * dmu[i];
        else rest_dmu = k * (remainder<T>(k, v, m, r) * dmu[i]);
        mu_dmu += path.mu[j + 1][i] * dmu[i];
        mu_g += path.mu[j][i] * (r * dmu[i]);
      }
      if constexpr (C::kShared) {
        rest_dmu = at.block_sum(rest_dmu);
        mu_dmu = at.block_sum(mu_dmu);
      }
      const auto grad = block_adjoint<T>(k2, lam_v, s_new, r, rest_dmu, mu_dmu, ds);
      x.ds[o] = to.a * (to.a * grad.dP);
      dynamics_back(x.dynamics, o, dt, path.s[j][o], mu_g, at.leads() ? grad.dP : T(0), x.da[o], x.dp[o], ddt[0]);
      over_slots[1] += at.leads() ? grad.dlam_v : T(0);
      KLA_UNROLL
      for (int i = o; i < end; ++i) {
        const T k = part.k[j][at.slot + i], q = part.q[j][at.slot + i], db = s_new * dmu[i];
        x.dmu[i] = to.a * (r * dmu[i]);
        over_slots[0] += k * db;
        over_channels[i] = lam_v * (v * db + 2 * k * grad.dphi);
        over_channels[S + i] = dy * path.mu[j + 1][i];
        if (VAR) over_channels[S + i] += 2 * q * (dy_var * s_new);
      }
    }
    int first = OverSlots::run(over_slots, at.lane);
    if constexpr (C::kGaps) {
      OverGaps::run(ddt, at.lane);
      if (OverGaps::owner(at.lane)) part.dt_ddt[C::kGaps ? j : 0][at.channel] = ddt[0];
    }
    if (OverSlots::owner(at.lane)) {
      if (first == 0) part.dy_db[j][at.channel] = over_slots[0];
      if (first + OverSlots::kKept == 2) part.v_dlam[j][at.channel] = over_slots[1 - first];
    }
    first = OverChannels::run(over_channels, at.lane);
    if (OverChannels::owner(at.lane))
      for (int f = 0; f < OverChannels::kKept; ++f) {
        const int which = (first + f) / S, i = (first + f) % S;
        part.slots[at.warp][j][which * At::kSlots + at.slot + i] = over_channels[f];
      }
  }
}

// One chunk: beliefs where its parts start, then part after part from the last.
template <class C, bool VAR>
KLA_DEVICE void chunk_back(const Params& p, const BackwardLanes<C>& at, Int t, Part<C>& part, Backward<C>& x) {
  constexpr int S = Backward<C>::S, O = Backward<C>::O;
  const Segment& seg = at.segment;
  const int tokens = static_cast<int>(seg.tokens - t < kChunk ? seg.tokens - t : kChunk);
  const int last = (tokens - 1) / kPart<C>;
  at.load(p, p.checkpoints, seg.chunk + t / kChunk, x.mu);
  at.load_each(p, p.checkpoints, p.chunks + seg.chunk + t / kChunk, x.s);
  for (int h = 0;; ++h) {
    for (int o = 0; o < O; ++o) part.starts[h][o][at.thread] = x.s[o];
    for (int i = 0; i < S; ++i) part.starts[h][O + i][at.thread] = x.mu[i];
    if (h == last) break;
    part.load_evidence(p, at, t + h * kPart<C>);
    __syncthreads();
    replay<C>(part, at, x);
    __syncthreads();
  }
  for (int h = last; h >= 0; --h) {
    part.load_evidence(p, at, t + h * kPart<C>);
    part.template load_gradients<VAR>(p, at, t + h * kPart<C>);
    for (int o = 0; o < O; ++o) x.s[o] = part.starts[h][o][at.thread];
    for (int i = 0; i < S; ++i) x.mu[i] = part.starts[h][O + i][at.thread];
    __syncthreads();
    Path<C> path;
    replay_path<C>(part, at, x, path);
    __syncwarp();  // otherwise the compiler keeps the evidence of both walks in registers, and spills
    adjoint<C, VAR>(part, at, path, x);
    __syncthreads();
    part.store_channels(p, at, t + h * kPart<C>);
    part.store_slots(p, at, t + h * kPart<C>);
    __syncthreads();
  }
}

// Gradients of one segment.
template <class C, bool VAR>
KLA_DEVICE void backward(const Params& p) {
  using T = typename C::T;
  using Shared = Part<C>;
  constexpr int O = Backward<C>::O;
  KLA_SHARED(Shared, part);
  const BackwardLanes<C> at(p);
  const Segment& seg = at.segment;
  T da[O] = {}, dp[O] = {};
  if (seg.used) {
    Backward<C> x;
    x.dynamics = at.dynamics(p);
    if (seg.last) {
      at.load(p, p.dmean, seg.row, x.dmu);
      at.load_blocks(p, p.dvariance, seg.row, x.ds);
    } else {
      at.load(p, p.borders, at.number, x.dmu);
      at.load_each(p, p.borders, p.segments + at.number, x.ds);
    }
    for (Int t = (seg.tokens - 1) / kChunk * kChunk; seg.tokens > 0 && t >= 0; t -= kChunk) {
      for (int o = 0; o < O; ++o) x.da[o] = x.dp[o] = T(0);
      chunk_back<C, VAR>(p, at, t, part, x);
      for (int o = 0; o < O; ++o) {
        da[o] += x.da[o];
        dp[o] += x.dp[o];
      }
    }
    if (seg.first) {
      at.store(p, p.dmean_0, seg.row, x.dmu);
      at.store_blocks(p, p.dvariance_0, seg.row, x.ds);
    }
  }
  if constexpr (C::kShared) {  // the other threads of a block have slots with a part in da too
    da[0] = at.block_sum(da[0]);
    dp[0] = at.block_sum(dp[0]);
  }
  at.store_blocks(p, p.dynamics_parts, at.number, da);
  at.store_blocks(p, p.dynamics_parts, p.segments + at.number, dp);
}

// The effect of a segment on the adjoint that arrives at its end, as the AdjointMap of segment.h, computed in one
// forward pass. The first segment of a row needs none.
template <class C, bool VAR>
KLA_DEVICE void summarise_back(const Params& p) {
  using T = typename C::T;
  using Shared = Tokens<C>;
  constexpr int S = Backward<C>::S, O = Backward<C>::O;
  KLA_SHARED(Shared, tokens);
  const BackwardLanes<C> at(p);
  const Segment& seg = at.segment;
  if (!seg.used || seg.first) return;
  const auto dynamics = at.dynamics(p);
  T s[O] = {}, mu[S] = {}, gain[O], ds_0[O], cross[S], dmu_0[S];
  for (int o = 0; o < O; ++o) {
    gain[o] = T(1);
    ds_0[o] = T(0);
  }
  for (int i = 0; i < S; ++i) cross[i] = dmu_0[i] = T(0);
  for (Int t = 0; t < seg.tokens; t += kPart<C>) {
    if (t % kChunk == 0) {
      at.load(p, p.checkpoints, seg.chunk + t / kChunk, mu);
      at.load_each(p, p.checkpoints, p.chunks + seg.chunk + t / kChunk, s);
    }
    tokens.load_evidence(p, at, t);
    tokens.template load_gradients<VAR>(p, at, t);
    __syncthreads();
    for (int j = 0; j < kPart<C>; ++j) {
      if (!tokens.real[j]) continue;
      const T lam_v = tokens.lam_v[j][at.channel], lv = lam_v * tokens.v_dlam[j][at.channel];
      const T dy = tokens.dy_db[j][at.channel], dy_var = VAR ? tokens.dy_var[j][at.channel] : T(0);
      const T dt = tokens.gap(at, j);
      KLA_UNROLL
      for (int o = 0; o < O; ++o) {
        const auto to = dynamics.step(o, dt);
        const T phi = tokens.key(at, j, o) * lam_v;
        const auto next = variance_step<T>(to.a, to.p, phi, s[o]);
        s[o] = next.s;
        gain[o] = to.a * (next.r * gain[o]);
        if (VAR && at.leads()) ds_0[o] += gain[o] * (gain[o] * (tokens.query(at, j, o) * dy_var));
        KLA_UNROLL
        for (int i = o; i < (C::kShared ? S : o + 1); ++i) {
          const T b = tokens.k[j][at.slot + i] * lv, m = to.a * mu[i];
          const T dmu = tokens.q[j][at.slot + i] * dy;
          cross[i] = to.a * (next.r * cross[i]) + gain[o] * (gain[o] * innovation<T>(phi, b, m));
          dmu_0[i] += gain[o] * dmu;
          ds_0[o] += cross[i] * dmu;
          mu[i] = mean_step<T>(next, m, b);
        }
      }
    }
    __syncthreads();
  }
  if constexpr (C::kShared) ds_0[0] = at.block_sum(ds_0[0]);
  at.store_each(p, p.summaries, at.number, gain);
  at.store(p, p.summaries, p.segments + at.number, cross);
  at.store(p, p.summaries, 2 * p.segments + at.number, dmu_0);
  at.store_each(p, p.summaries, 3 * p.segments + at.number, ds_0);
}

// Passes the adjoint of every block of slots from segment to segment, from the last; one thread per block
// and channel, with the adjoints of its means in memory.
template <class T>
KLA_DEVICE void link_back(const Params& p) {
  const Int lanes = p.N * p.D, field = p.segments * lanes, blocks = p.G * p.D;
  const Int index = static_cast<Int>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (index >= p.R * blocks) return;
  const Int row = index / blocks, number = first_segment(p, row);
  const Int lane = index % blocks / p.D * p.m * p.D + index % p.D;  // of the first slot
  T* borders = static_cast<T*>(p.borders);
  const T* dmean = static_cast<const T*>(p.dmean);
  T ds = p.dvariance ? static_cast<const T*>(p.dvariance)[index] : T(0);
  const Int last = number + count_segments(p, row) - 1;
  for (Int i = last; i > number; --i) {
    const T* map = static_cast<const T*>(p.summaries) + i * lanes + lane;
    const T gain = map[0];
    T slope = T(0);
    for (Int n = 0; n < p.m * p.D; n += p.D) {
      const T here = dmean ? dmean[row * lanes + lane + n] : T(0);
      const T dmu = i == last ? here : borders[i * lanes + lane + n];
      slope += map[field + n] * dmu;
      borders[(i - 1) * lanes + lane + n] = gain * dmu + map[2 * field + n];
    }
    ds = gain * (gain * ds) + slope + map[3 * field];
    for (Int n = 0; n < p.m * p.D; n += p.D) borders[field + (i - 1) * lanes + lane + n] = ds;
  }
}

// dk and dq: the sums of the channel blocks, added in order.
template <class C>
KLA_DEVICE void sum_slots(const Params& p) {
  using T = typename C::T;
  using At = BackwardLanes<C>;
  constexpr int SLOTS = At::kSlots;
  const Int index = static_cast<Int>(blockIdx.x) * kSumThreads + threadIdx.x;
  const Int tokens = p.B * p.T, block = tokens * 2 * SLOTS;
  if (index >= block) return;
  const Int token = index / (2 * SLOTS), which = index / SLOTS % 2, place = p.n0 + index % SLOTS;
  if (place % p.places >= p.m || place / p.places >= p.G) return;
  const Int n = place / p.places * p.m + place % p.places;
  T* earlier = static_cast<T*>(p.slot_sums) + (which * tokens + token) * p.N + n;
  T sum = p.block0 > 0 ? *earlier : T(0);
  for (Int i = 0; i < p.blocks; ++i) sum += static_cast<const T*>(p.slot_parts)[i * block + index];
  if ((p.block0 + p.blocks) * At::kChannels < p.D) *earlier = sum;
  else write(which == 0 ? p.dk : p.dq, which == 0 ? p.k.dtype : p.q.dtype, token * p.N + n, sum);
}

// da_bar and dp_bar: the sums of the segments, added in order.
template <class T>
KLA_DEVICE void sum_dynamics(const Params& p) {
  const Int lanes = p.G * p.D, index = static_cast<Int>(blockIdx.x) * kSumThreads + threadIdx.x;
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

using Here = kla::Config<KLA_T, KLA_GROUP, KLA_BLOCKS, KLA_GAPS>;
#define KLA_BACKWARD(name, blocks) KLA_KERNEL(name, kla::kBackwardThreads<Here>, blocks)

KLA_BACKWARD(kla_backward, kla::kBackwardBlocks<Here>) { kla::backward<Here, false>(p); }
KLA_BACKWARD(kla_backward_variance, kla::kBackwardBlocks<Here>) { kla::backward<Here, true>(p); }
KLA_BACKWARD(kla_summarise_back, 3) { kla::summarise_back<Here, false>(p); }
KLA_BACKWARD(kla_summarise_back_variance, 3) { kla::summarise_back<Here, true>(p); }
KLA_KERNEL(kla_link_back, kla::kSumThreads, 4) { kla::link_back<KLA_T>(p); }
KLA_KERNEL(kla_sum_slots, kla::kSumThreads, 8) { kla::sum_slots<Here>(p); }
KLA_KERNEL(kla_sum_dynamics, kla::kSumThreads, 8) { kla::sum_dynamics<KLA_T>(p); }
