// The working arrays of a task, in L1 or L2: what a core loop reads and writes besides the stage.
#ifndef KLA_CPU_TILE_H
#define KLA_CPU_TILE_H

#include <cstring>
#include <type_traits>

#include "plan.h"
#include "stage.h"

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

  // Calls f(slot, first channel of a tile, how many channels): whole tiles with a constant count, so
  // that what f does with them is vectorised without prologue or tail.
  template <class F>
  KLA_METHOD void each(int64_t size, F f) const {
    int64_t d = 0;
    for (; d + kTile <= size; d += kTile)
      for (int64_t n = 0; n < N; ++n) f(n, d, std::integral_constant<int, kTile>{});
    if (d < size)
      for (int64_t n = 0; n < N; ++n) f(n, d, static_cast<int>(size - d));
  }

  // Fills a field from channels [d0, d0 + size) of an [N, D] array, with zero beyond; a null source
  // reads as zero.
  void load(int field, const T* src, int64_t D, int64_t d0, int64_t size) const {
    if (src == nullptr) return fill(field, T(0), size);
    each(size, [&](int64_t n, int64_t d, auto count) {
      T* dst = at(d, n, field);
      memcpy(dst, src + n * D + d0 + d, static_cast<size_t>(count) * sizeof(T));
      std::fill(dst + count, dst + kTile, T(0));
    });
  }

  void fill(int field, T value, int64_t size) const {
    for (int64_t d = 0; d < size; d += kTile)
      for (int64_t n = 0; n < N; ++n) std::fill(at(d, n, field), at(d, n, field) + kTile, value);
  }

  void store(int field, T* dst, int64_t D, int64_t d0, int64_t size) const {
    each(size, [&](int64_t n, int64_t d, auto count) {
      memcpy(dst + n * D + d0 + d, at(d, n, field), static_cast<size_t>(count) * sizeof(T));
    });
  }

  // sum[n, d] += field, in double: sums over a long time need more digits than one chunk.
  void add_to(int field, double* sum, int64_t D, int64_t d0, int64_t size) const {
    each(size, [&](int64_t n, int64_t d, auto count) {
      const T* src = at(d, n, field);
      double* dst = sum + n * D + d0 + d;
      for (int i = 0; i < count; ++i) dst[i] += src[i];
    });
  }
};

// A chunk replayed for one tile and a block of slots, [chunk + 1, slots, 4, lanes of a tile]: the belief
// before each token, and r and the remainder of its step.
enum PathField { kPathS, kPathMu, kPathR, kPathRest, kPathFields };

// What the adjoint of a group collects over slots, tiles and tokens.
template <class T>
struct Sums {
  T *acc_v, *acc_lam;  // [chunk, lanes of a tile], sums over the blocks of slots so far
  T *dk, *dq;          // [chunk * N, lanes], sums over the tiles of a unit: one vector per token and slot

  Sums(Arena& arena, int64_t tokens, int64_t N, int64_t tile) {
    for (T** x : {&acc_v, &acc_lam}) *x = arena.take<T>(tokens * tile);
    for (T** x : {&dk, &dq}) *x = arena.take<T>((tokens * N + kLanes<T>) * kLanes<T>);
  }

  template <int W>
  KLA_METHOD void load_token(int64_t j, bool begun, Vec<T>* v, Vec<T>* lam) const {
    constexpr int L = kLanes<T>;
    for (int w = 0; w < W; ++w) {
      v[w] = begun ? load(acc_v + (j * W + w) * L) : Vec<T>{};
      lam[w] = begun ? load(acc_lam + (j * W + w) * L) : Vec<T>{};
    }
  }

  // dv = lam_v acc_v and dlam_v = acc_lam, when all slots are in.
  template <int W>
  KLA_METHOD void store_token(int64_t j, int64_t d, bool done, const Vec<T>* av, const Vec<T>* al,
                              const Vec<T>* lam_v, const ChannelRows<T>& rows) const {
    constexpr int L = kLanes<T>;
    for (int w = 0; w < W; ++w) {
      if (done) {
        store_any(rows.dv.at(j, d + w * L), lam_v[w] * av[w]);
        store_any(rows.dlam_v.at(j, d + w * L), al[w]);
      } else {
        store(acc_v + (j * W + w) * L, av[w]);
        store(acc_lam + (j * W + w) * L, al[w]);
      }
    }
  }

  KLA_METHOD void add_slot(int64_t slot, bool first, Vec<T> dk_, Vec<T> dq_) {
    T *k = dk + slot * kLanes<T>, *q = dq + slot * kLanes<T>;
    store(k, first ? dk_ : load(k) + dk_);
    store(q, first ? dq_ : load(q) + dq_);
  }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
