// The working arrays of a task, in L1 or L2: what a core loop reads and writes besides the stage.
#ifndef KLA_CPU_TILE_H
#define KLA_CPU_TILE_H

#include <cstring>

#include "plan.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

// What a task keeps per slot and channel: every pass the first four, and then what is its own.
enum Field { kS, kMu, kA, kP, kForwardFields };
enum BackwardField { kDmu = kForwardFields, kDs, kDa, kDp, kBackwardFields };
enum SummaryField { kGain = kForwardFields, kJ, kEta, kCross = kJ, kDmu0, kDs0, kSummaryFields };

// The channels of a group cut into tiles of W vectors; [tiles, N, fields, lanes of a tile]. The fields of
// a slot lie side by side, so that a core loop walks one pointer and no two streams share a cache set.
template <class T, int W>
struct Tiles {
  static constexpr int kTile = W * kLanes<T>;
  T* data;
  int64_t N, fields, width;

  Tiles(Arena& arena, int64_t N_, int64_t fields_, int64_t width_)
      : data(arena.take<T>(N_ * fields_ * width_)), N(N_), fields(fields_), width(width_) {}

  int64_t step() const { return fields * kTile; }
  T* tile(int64_t d) const { return data + d * N * fields; }
  T* at(int64_t d, int64_t n, int field) const { return tile(d) + (n * fields + field) * kTile; }

  // Fills a field from channels [d0, d0 + size) of an [N, D] array, with zero beyond; a null source
  // reads as zero.
  void load(int field, const T* src, int64_t D, int64_t d0, int64_t size) const {
    for (int64_t d = 0; d < size; d += kTile)
      for (int64_t n = 0; n < N; ++n) {
        T* dst = at(d, n, field);
        const int64_t count = src ? std::min<int64_t>(kTile, size - d) : 0;
        for (int64_t i = 0; i < count; ++i) dst[i] = src[n * D + d0 + d + i];
        for (int64_t i = count; i < kTile; ++i) dst[i] = 0;
      }
  }

  void fill(int field, T value, int64_t size) const {
    for (int64_t d = 0; d < size; d += kTile)
      for (int64_t n = 0; n < N; ++n) std::fill(at(d, n, field), at(d, n, field) + kTile, value);
  }

  void store(int field, T* dst, int64_t D, int64_t d0, int64_t size) const {
    for (int64_t d = 0; d < size; d += kTile)
      for (int64_t n = 0; n < N; ++n)
        memcpy(dst + n * D + d0 + d, at(d, n, field),
               static_cast<size_t>(std::min<int64_t>(kTile, size - d)) * sizeof(T));
  }

  // sum[n, d] += field, in double: sums over a long time need more digits than one chunk.
  void add_to(int field, double* sum, int64_t D, int64_t d0, int64_t size) const {
    for (int64_t d = 0; d < size; d += kTile)
      for (int64_t n = 0; n < N; ++n) {
        const T* src = at(d, n, field);
        double* dst = sum + n * D + d0 + d;
        const int64_t count = std::min<int64_t>(kTile, size - d);
        for (int64_t i = 0; i < count; ++i) dst[i] += src[i];
      }
  }
};

// A chunk replayed for one tile and a block of slots, [chunk + 1, slots, 4, lanes of a tile]: the belief
// before each token and what filter_step found besides the next one.
enum PathField { kPathS, kPathMu, kPathR, kPathE, kPathFields };

// What the adjoint of a group collects over slots, tiles and tokens.
template <class T>
struct Sums {
  T *dy, *dy_var;      // [chunk, pitch], inputs
  T *acc_v, *acc_lam;  // [chunk, pitch], sums over slots
  T *dk, *dq;          // [chunk * N, lanes], sums over the tiles of a unit: one vector per token and slot

  Sums(Arena& arena, int64_t tokens, int64_t N, int64_t pitch) {
    for (T** x : {&dy, &dy_var, &acc_v, &acc_lam}) *x = arena.take<T>(tokens * pitch);
    for (T** x : {&dk, &dq}) *x = arena.take<T>((tokens * N + kLanes<T>) * kLanes<T>);
  }

  __attribute__((always_inline)) void add_slot(int64_t slot, bool first, Vec<T> dk_, Vec<T> dq_) {
    T *k = dk + slot * kLanes<T>, *q = dq + slot * kLanes<T>;
    store(k, first ? dk_ : load(k) + dk_);
    store(q, first ? dq_ : load(q) + dq_);
  }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
