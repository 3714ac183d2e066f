// Cutting time, for calls with too few rows and channels to occupy the threads. Three rounds: summarise
// the segments side by side (segment.h), carry the belief or its adjoint from segment to segment, and run
// the ordinary pass with the segments as rows. Only what enters a segment comes from a summary.
#ifndef KLA_CPU_SEGMENTS_H
#define KLA_CPU_SEGMENTS_H

#include <iterator>

#include "../segment.h"
#include "backward.h"
#include "forward.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

template <class T>
struct ForwardDirection {
  using Map = FilterMap<T>;
  static constexpr bool kReverse = false;
  static constexpr int kFields[] = {kS, kMu, kGain, kJ, kEta};
};

template <class T>
struct BackwardDirection {
  using Map = AdjointMap<T>;
  static constexpr bool kReverse = true;
  static constexpr int kFields[] = {kGain, kCross, kDmu0, kDs0};
};

// What is known of every segment, [R, N, D] each; (s, mu) stands for (ds, dmu) in the backward direction.
// The first-order scan leaves all that belongs to a variance at 0, and the same formulas hold for it.
template <class T, class Way>
struct SegmentArrays {
  T* map[std::size(Way::kFields)];
  T *s_in, *mu_in, *s_out, *mu_out;

  SegmentArrays(Arena& arena, const Scan& p) {
    const int64_t size = p.R * p.N * p.D;
    for (T*& x : map) x = arena.take<T>(size);
    for (T** x : {&s_in, &mu_in, &s_out, &mu_out}) *x = arena.take<T>(size);
  }

  // Only the maps, where the caller wants them: one after the other.
  SegmentArrays(T* maps, int64_t size) : s_in(), mu_in(), s_out(), mu_out() {
    for (T*& x : map) {
      x = maps;
      maps += size;
    }
  }

  typename Way::Map map_at(int64_t i) const {
    if constexpr (Way::kReverse) return {map[0][i], map[1][i], map[2][i], map[3][i]};
    else return {map[0][i], map[1][i], map[2][i], map[3][i], map[4][i]};
  }
};

template <class T, int W>
struct SummaryScratch {
  Stage<T> in;
  Tiles<T, W> state;
  T *dy, *dy_var;

  SummaryScratch(Arena& arena, const Scan& p, const Groups& groups)
      : in(arena, groups.pitch(), p.N, p.T), state(arena, p.N, kSummaryFields, groups.width) {
    for (T** x : {&dy, &dy_var}) *x = arena.take<T>(KLA_CHUNK * in.pitch);
  }
};

template <class M, class T, int W, class Way>
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
      if (!all && r == at(r / p_.segments, p_.segments - 1)) return;
      Arena arena(block.data() + measure.used() * static_cast<size_t>(worker));
      SummaryScratch<T, W> scratch(arena, p_, groups_);
      summarise_segment(r, i % groups_.count, scratch, x);
    };
    parallel_for(threads_, p_.pool, p_.R * groups_.count, task);
    return KLA_OK;
  }

  // Fills what enters every segment, from the arrays [rows, N, D] that enter the rows; null reads as 0.
  int enter(const SegmentArrays<T, Way>& x, const void* s, const void* mu) const {
    if (const int status = summarise(x, false)) return status;
    auto carry = [&](int64_t row, int) {
      copy(s, row, x.s_in, at(row, 0));
      copy(mu, row, x.mu_in, at(row, 0));
      for (int64_t i = 1; i < p_.segments; ++i) carry_over(x, at(row, i - 1), at(row, i));
    };
    parallel_for(threads_, p_.pool, p_.R / p_.segments, carry);
    return KLA_OK;
  }

  // Copies what leaves the rows: what leaves the last of their segments.
  void leave(const SegmentArrays<T, Way>& x, void* s, void* mu) const {
    for (int64_t row = 0; row < p_.R / p_.segments; ++row) {
      const int64_t last = at(row, p_.segments - 1);
      copy(x.mu_out, last, static_cast<T*>(mu), row);
      if (M::kHasVariance) copy(x.s_out, last, static_cast<T*>(s), row);
    }
  }

 private:
  const Scan& p_;
  const kla_scan_grads* g_;
  const int64_t threads_;
  const Groups groups_;

  // The i-th segment of a row in the direction of travel.
  int64_t at(int64_t row, int64_t i) const {
    return row * p_.segments + (Way::kReverse ? p_.segments - 1 - i : i);
  }

  void copy(const void* src, int64_t from, T* dst, int64_t to) const {
    const int64_t nd = p_.N * p_.D;
    if (src) memcpy(dst + to * nd, static_cast<const T*>(src) + from * nd, static_cast<size_t>(nd) * sizeof(T));
    else std::fill(dst + to * nd, dst + (to + 1) * nd, T(0));
  }

  void carry_over(const SegmentArrays<T, Way>& x, int64_t from, int64_t to) const {
    const int64_t nd = p_.N * p_.D;
    for (int64_t i = 0; i < nd; ++i) {
      T s = x.s_in[from * nd + i], mu = x.mu_in[from * nd + i];
      apply(x.map_at(from * nd + i), s, mu);
      x.s_in[to * nd + i] = s;
      x.mu_in[to * nd + i] = mu;
    }
  }

  void summarise_segment(int64_t r, int64_t g, SummaryScratch<T, W>& x,
                         const SegmentArrays<T, Way>& out) const {
    const Row row = row_at(p_, r);
    const int64_t d0 = groups_.begin(g), size = groups_.size(g);
    const auto read = [&](int field, const void* src, int64_t index) {
      x.state.load(field, state_row<T>(src, p_, index), p_.D, d0, size);
    };
    read(kA, p_.a_bar, 0);
    read(kP, p_.p_bar, 0);
    for (int field = kGain; field < kSummaryFields; ++field) read(field, nullptr, 0);
    x.state.fill(kGain, T(1), size);
    // The forward summary starts from a certain 0, the backward one from the belief it will meet.
    const bool known = Way::kReverse && row.length > 0;
    read(kMu, known ? p_.checkpoints : nullptr, row.chunk0);
    read(kS, known && M::kHasVariance ? p_.checkpoints : nullptr, num_chunks(p_) + row.chunk0);
    for (int64_t c = 0; c < row.chunks(); ++c) {
      x.in.load_chunk(p_, row, c, d0, size);
      if (Way::kReverse) {
        x.in.load_channels(g_->dy, row, d0, x.dy);
        x.in.load_channels(g_->dy_var, row, d0, x.dy_var);
      }
      for (int64_t d = 0; d < size; d += W * kLanes<T>) {
        if constexpr (Way::kReverse) M::template adjoint_map<T, W>(x.in, x.state, d, x.dy, x.dy_var);
        else M::template filter_map<T, W>(x.in, x.state, d);
      }
    }
    for (size_t i = 0; i < std::size(Way::kFields); ++i)
      x.state.store(Way::kFields[i], state_row<T>(out.map[i], p_, r), p_.D, d0, size);
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
  const Segments<M, T, W, ForwardDirection<T>> segments(p, nullptr);
  if (const int status = segments.enter(x, p.variance_0, p.mean_0)) return status;
  Scan rows = p;
  rows.mean_0 = x.mu_in;
  rows.mean = x.mu_out;
  if (M::kHasVariance) {
    rows.variance_0 = x.s_in;
    rows.variance = x.s_out;
  }
  if (const int status = forward_rows<M, T, W>(rows)) return status;
  segments.leave(x, p.variance, p.mean);
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
  const Segments<M, T, W, BackwardDirection<T>> segments(p, &g);
  if (const int status = segments.enter(x, g.dvariance, g.dmean)) return status;
  kla_scan_grads rows = g;
  rows.dmean = x.mu_in;
  rows.dvariance = x.s_in;
  rows.dmean_0 = x.mu_out;
  rows.dvariance_0 = x.s_out;
  if (const int status = Backward<M, T, W>(p, rows).run()) return status;
  segments.leave(x, g.dvariance_0, g.dmean_0);
  return KLA_OK;
}

// The maps of whole rows, [fields, R, N, D], for callers that cut time themselves.
template <class M, class T, int W, class Way>
int summarise_rows(const Scan& p, const kla_scan_grads* g, void* maps) {
  const SegmentArrays<T, Way> x(static_cast<T*>(maps), p.R * p.N * p.D);
  return Segments<M, T, W, Way>(p, g).summarise(x, true);
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
