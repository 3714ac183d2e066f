// Splitting time, for calls with too few rows and channels to occupy the threads. Three rounds: summarise the
// segments in parallel (segment.h), carry the belief or its adjoint from segment to segment, and run the ordinary
// pass with the segments as rows. Only what enters a segment comes from a summary.
#ifndef KLA_CPU_SEGMENTS_H
#define KLA_CPU_SEGMENTS_H

#include "../segment.h"
#include "backward.h"
#include "forward.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

// The maps of segments, in the order of segment.h. (s, mu) stands for (ds, dmu) in the backward direction.
template <class T>
struct ForwardDirection {
  static constexpr bool kReverse = false;
  static constexpr int kCount = 5;

  template <class F>
  static void each_field(F f) {
    f(0, kS), f(1, kMu), f(2, kGain), f(3, kJ), f(4, kEta);
  }

  // What leaves a segment, from what enters it, for one channel of a block: `i` is that of the block, and the
  // slots of the block are n0, n0 + D, ..., n0 + (m - 1) D.
  static void carry(T* const* map, int64_t i, int64_t n0, int64_t m, int64_t D, T* s, T* mu) {
    const T gain = map[2][i], scale = 1 / (1 + map[3][i] * *s);
    for (int64_t j = 0, n = n0; j < m; ++j, n += D)
      mu[j * D] = map[1][n] + gain * ((mu[j * D] + *s * map[4][n]) * scale);
    *s = map[0][i] + gain * (gain * (*s * scale));
  }
};

template <class T>
struct BackwardDirection {
  static constexpr bool kReverse = true;
  static constexpr int kCount = 4;

  template <class F>
  static void each_field(F f) {
    f(0, kGain), f(1, kCross), f(2, kDmu0), f(3, kDs0);
  }

  static void carry(T* const* map, int64_t i, int64_t n0, int64_t m, int64_t D, T* ds, T* dmu) {
    const T gain = map[0][i];
    *ds = gain * (gain * *ds) + map[3][i];
    for (int64_t j = 0, n = n0; j < m; ++j, n += D) {
      *ds += map[1][n] * dmu[j * D];
      dmu[j * D] = gain * dmu[j * D] + map[2][n];
    }
  }
};

// The summaries of all segments, [R, N, D] or [R, G, D] each. For the first-order scan everything that belongs to
// a variance is 0, and the same formulas hold. Independent of the model and of the width of tiles, so compiled
// only once per type and direction.
template <class T, class Way>
struct SegmentArrays {
  T* map[Way::kCount];
  T *s_in, *mu_in, *s_out, *mu_out;

  SegmentArrays(Arena& arena, const Scan& p) {
    Way::each_field([&](int i, auto field) { map[i] = arena.take<T>(p.R * rows(p, field) * p.D); });
    for (T** x : {&s_in, &s_out}) *x = arena.take<T>(p.R * p.G * p.D);
    for (T** x : {&mu_in, &mu_out}) *x = arena.take<T>(p.R * p.N * p.D);
  }

  // Only the maps, in the caller's memory, concatenated.
  SegmentArrays(T* maps, const Scan& p) : s_in(), mu_in(), s_out(), mu_out() {
    Way::each_field([&](int i, auto field) {
      map[i] = maps;
      maps += p.R * rows(p, field) * p.D;
    });
  }

  static int64_t rows(const Scan& p, BlockField) { return p.G; }
  static int64_t rows(const Scan& p, SlotField) { return p.N; }

  // The i-th segment of a row in the direction of travel.
  static int64_t at(const Scan& p, int64_t row, int64_t i) {
    return row * p.segments + (Way::kReverse ? p.segments - 1 - i : i);
  }

  // Fills what enters every segment, from the arrays [rows, N, D] that enter the rows; null reads as 0.
  void carry(const Scan& p, int64_t threads, const void* s, const void* mu) const {
    auto walk = [&](int64_t row, int) {
      copy(p, s, row, s_in, at(p, row, 0), p.G);
      copy(p, mu, row, mu_in, at(p, row, 0), p.N);
      for (int64_t i = 1; i < p.segments; ++i) carry_over(p, at(p, row, i - 1), at(p, row, i));
    };
    parallel_for(threads, p.pool, p.R / p.segments, walk);
  }

  // Copies what leaves the rows: what leaves the last of their segments. A scan without a variance has no `s`.
  void leave(const Scan& p, bool variance, void* s, void* mu) const {
    for (int64_t row = 0; row < p.R / p.segments; ++row) {
      const int64_t last = at(p, row, p.segments - 1);
      copy(p, mu_out, last, static_cast<T*>(mu), row, p.N);
      if (variance) copy(p, s_out, last, static_cast<T*>(s), row, p.G);
    }
  }

 private:
  // Row `from` of an array [*, rows, D] to row `to` of another.
  static void copy(const Scan& p, const void* src, int64_t from, T* dst, int64_t to, int64_t rows) {
    const int64_t size = rows * p.D;
    if (src) memcpy(dst + to * size, static_cast<const T*>(src) + from * size, static_cast<size_t>(size) * sizeof(T));
    else std::fill(dst + to * size, dst + (to + 1) * size, T(0));
  }

  void carry_over(const Scan& p, int64_t from, int64_t to) const {
    const int64_t m = p.N / p.G;
    copy(p, s_in, from, s_in, to, p.G);
    copy(p, mu_in, from, mu_in, to, p.N);
    for (int64_t g = 0; g < p.G; ++g)
      for (int64_t d = 0; d < p.D; ++d) {
        const int64_t i = g * p.D + d, n = g * m * p.D + d;
        Way::carry(map, from * p.G * p.D + i, from * p.N * p.D + n, m, p.D, s_in + to * p.G * p.D + i,
                   mu_in + to * p.N * p.D + n);
      }
  }
};

template <class T, int W>
struct SummaryScratch {
  Stage<T> in;
  Tiles<T, W> state;
  T *dy, *dy_var;

  SummaryScratch(Arena& arena, const Scan& p, const Groups& groups)
      : in(arena, groups.pitch(), p), state(arena, p, kSummaryBlock, kSummarySlot, groups.width) {
    for (T** x : {&dy, &dy_var}) *x = arena.take<T>(KLA_CHUNK * in.pitch);
  }

  SummaryRows<T> rows(const Scan& p, const kla_scan_grads* g, const Row& row, int64_t d0) const {
    constexpr int64_t kTile = W * kLanes<T>;
    const Rows<const T> none{nullptr, 0};
    return {in.read_channels(p.v, row, d0, kTile, in.v),
            in.read_channels(p.lam_v, row, d0, kTile, in.lam_v),
            in.read_gaps(p, row, d0, kTile),
            g ? in.read_channels(g->dy, row, d0, kTile, dy) : none,
            g ? in.read_channels(g->dy_var, row, d0, kTile, dy_var) : none};
  }
};

template <class Maps, class T, int W, class Way>
class Segments {
 public:
  Segments(const Scan& p, const kla_scan_grads* g)
      : p_(p), g_(g), threads_(useful_threads(p)), groups_(p, threads_, W * kLanes<T>) {}

  // Fills the maps of the segments: of all, or of those that something comes after.
  int summarise(const SegmentArrays<T, Way>& x, bool all) const {
    Arena measure(nullptr);
    SummaryScratch<T, W>(measure, p_, groups_);
    const Block block(measure.used() * static_cast<size_t>(threads_));
    if (!block) return KLA_ERROR_MEMORY;
    auto task = [&](int64_t i, int worker) {
      const int64_t r = i / groups_.count;
      if (!all && r == x.at(p_, r / p_.segments, p_.segments - 1)) return;
      Arena arena(block.data() + measure.used() * static_cast<size_t>(worker));
      SummaryScratch<T, W> scratch(arena, p_, groups_);
      summarise_segment(r, i % groups_.count, scratch, x);
    };
    parallel_for(threads_, p_.pool, p_.R * groups_.count, task);
    return KLA_OK;
  }

  // Fills what enters every segment, from what enters the rows.
  int enter(const SegmentArrays<T, Way>& x, const void* s, const void* mu) const {
    if (const int status = summarise(x, false)) return status;
    x.carry(p_, threads_, s, mu);
    return KLA_OK;
  }

 private:
  const Scan& p_;
  const kla_scan_grads* g_;
  const int64_t threads_;
  const Groups groups_;

  void summarise_segment(int64_t r, int64_t g, SummaryScratch<T, W>& x,
                         const SegmentArrays<T, Way>& out) const {
    const Row row = row_at(p_, r);
    const int64_t d0 = groups_.begin(g), size = groups_.size(g);
    const auto read = [&](auto field, const void* src, int64_t index) {
      x.state.load(field, src, index, p_.D, d0, size);
    };
    read(kA, p_.a_bar, 0);
    read(kP, p_.p_bar, 0);
    Way::each_field([&](int, auto field) { read(field, nullptr, 0); });
    x.state.fill(kGain, T(1), size);
    // The forward summary starts from 0 with certainty, the backward one from the actual belief.
    const bool known = Way::kReverse && row.length > 0;
    read(kMu, known ? p_.checkpoints : nullptr, row.chunk0);
    read(kS, known && Maps::kHasVariance ? saved_variances<T>(p_) : nullptr, row.chunk0);
    for (int64_t c = 0; c < row.chunks(); ++c) {
      x.in.begin_chunk(p_, row, c, size);
      const SummaryRows<T> rows = x.rows(p_, Way::kReverse ? g_ : nullptr, row, d0);
      for (int64_t d = 0; d < size; d += W * kLanes<T>) {
        if constexpr (Way::kReverse) Maps::template adjoint_map<T, W>(x.in, rows, x.state, d);
        else Maps::template filter_map<T, W>(x.in, rows, x.state, d);
      }
    }
    Way::each_field([&](int i, auto field) { x.state.store(field, out.map[i], r, p_.D, d0, size); });
  }
};

template <class M, class T, int W>
int forward_segments(const Scan& p) {
  using Arrays = SegmentArrays<T, ForwardDirection<T>>;
  Arena measure(nullptr);
  Arrays(measure, p);
  const Block block(measure.used());
  if (!block) return KLA_ERROR_MEMORY;
  Arena arena(block.data());
  const Arrays x(arena, p);
  const Segments<typename M::Maps, T, W, ForwardDirection<T>> segments(p, nullptr);
  if (const int status = segments.enter(x, p.variance_0, p.mean_0)) return status;
  Scan rows = p;
  rows.mean_0 = x.mu_in;
  rows.mean = x.mu_out;
  if (M::kHasVariance) {
    rows.variance_0 = x.s_in;
    rows.variance = x.s_out;
  }
  if (const int status = forward_rows<M, T, W>(rows)) return status;
  x.leave(p, M::kHasVariance, p.variance, p.mean);
  return KLA_OK;
}

template <class M, class T, int W>
int backward_segments(const Scan& p, const kla_scan_grads& g) {
  using Arrays = SegmentArrays<T, BackwardDirection<T>>;
  Arena measure(nullptr);
  Arrays(measure, p);
  const Block block(measure.used());
  if (!block) return KLA_ERROR_MEMORY;
  Arena arena(block.data());
  const Arrays x(arena, p);
  const Segments<typename M::Maps, T, W, BackwardDirection<T>> segments(p, &g);
  if (const int status = segments.enter(x, g.dvariance, g.dmean)) return status;
  kla_scan_grads rows = g;
  rows.dmean = x.mu_in;
  rows.dvariance = x.s_in;
  rows.dmean_0 = x.mu_out;
  rows.dvariance_0 = x.s_out;
  if (const int status = Backward<M, T, W>(p, rows).run()) return status;
  x.leave(p, M::kHasVariance, g.dvariance_0, g.dmean_0);
  return KLA_OK;
}

// The maps of whole rows, concatenated, for callers that split time themselves.
template <class M, class T, int W, class Way>
int summarise_rows(const Scan& p, const kla_scan_grads* g, void* maps) {
  const SegmentArrays<T, Way> x(static_cast<T*>(maps), p);
  return Segments<typename M::Maps, T, W, Way>(p, g).summarise(x, true);
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
