// The working arrays of a task, in L1 or L2: what a core loop reads and writes besides the stage.
#ifndef KLA_CPU_TILE_H
#define KLA_CPU_TILE_H

#include <cstring>
#include <type_traits>

#include "plan.h"
#include "stage.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

// What a task keeps per channel, of every block of slots that share a variance and of every slot: every
// pass the first ones, and then what is its own.
enum BlockField {
  kS, kA, kP, kForwardBlock,
  kC = kForwardBlock, kSharedBlock,
  kDs = kForwardBlock, kDa, kDp, kBackwardBlock,
  kGain = kForwardBlock, kJ, kDs0 = kJ, kSummaryBlock
};
enum SlotField {
  kMu, kForwardSlot,
  kDmu = kForwardSlot, kBackwardSlot,
  kEta = kForwardSlot, kCross = kEta, kDmu0, kSummarySlot
};

// The channels of a group cut into tiles of W vectors; [tiles, G, block fields and then m times the slot
// fields, lanes of a tile]. What belongs to a block lies side by side, so that a core loop walks one pointer
// and no two streams share a cache set.
template <class T, int W>
struct Tiles {
  static constexpr int kTile = W * kLanes<T>;
  T* data;
  int64_t G, m, block_fields, slot_fields;

  Tiles(Arena& arena, const kla_scan_params& p, int block_fields_, int slot_fields_, int64_t width)
      : G(p.G), m(p.N / p.G), block_fields(block_fields_), slot_fields(slot_fields_) {
    data = arena.take<T>(G * fields() * width);
  }

  int64_t fields() const { return block_fields + m * slot_fields; }  // of a block
  int64_t step() const { return fields() * kTile; }
  T* tile(int64_t d) const { return data + d * G * fields(); }
  T* block(int64_t d, int64_t g) const { return tile(d) + g * step(); }
  T* at(int64_t d, int64_t g, BlockField field) const { return block(d, g) + field * kTile; }
  T* at(int64_t d, int64_t n, SlotField field) const {
    return block(d, n / m) + (block_fields + n % m * slot_fields + field) * kTile;
  }
  int64_t rows(BlockField) const { return G; }
  int64_t rows(SlotField) const { return G * m; }

  // Calls f(row, first channel of a tile, how many channels): whole tiles with a constant count, so
  // that what f does with them is vectorised without prologue or tail.
  template <class F>
  KLA_METHOD void each(int64_t rows, int64_t size, F f) const {
    int64_t d = 0;
    for (; d + kTile <= size; d += kTile)
      for (int64_t i = 0; i < rows; ++i) f(i, d, std::integral_constant<int, kTile>{});
    if (d < size)
      for (int64_t i = 0; i < rows; ++i) f(i, d, static_cast<int>(size - d));
  }

  // Fills a field from channels [d0, d0 + size) of row r of an array [*, N or G, D], with zero beyond; a null
  // source reads as zero.
  template <class Field>
  void load(Field field, const void* src, int64_t r, int64_t D, int64_t d0, int64_t size) const {
    if (src == nullptr) return fill(field, T(0), size);
    const T* from = static_cast<const T*>(src) + r * rows(field) * D + d0;
    each(rows(field), size, [&](int64_t i, int64_t d, auto count) {
      T* dst = at(d, i, field);
      memcpy(dst, from + i * D + d, static_cast<size_t>(count) * sizeof(T));
      std::fill(dst + count, dst + kTile, T(0));
    });
  }

  template <class Field>
  void fill(Field field, T value, int64_t size) const {
    for (int64_t d = 0; d < size; d += kTile)
      for (int64_t i = 0; i < rows(field); ++i) std::fill(at(d, i, field), at(d, i, field) + kTile, value);
  }

  template <class Field>
  void store(Field field, void* dst, int64_t r, int64_t D, int64_t d0, int64_t size) const {
    T* to = static_cast<T*>(dst) + r * rows(field) * D + d0;
    each(rows(field), size, [&](int64_t i, int64_t d, auto count) {
      memcpy(to + i * D + d, at(d, i, field), static_cast<size_t>(count) * sizeof(T));
    });
  }

  // sum[g, d] += field, in double: sums over a long time need more digits than one chunk.
  void add_to(BlockField field, double* sum, int64_t D, int64_t d0, int64_t size) const {
    each(G, size, [&](int64_t g, int64_t d, auto count) {
      const T* src = at(d, g, field);
      double* dst = sum + g * D + d0 + d;
      for (int i = 0; i < count; ++i) dst[i] += src[i];
    });
  }
};

// A chunk replayed for one tile and some slots, [chunk + 1, slots, 4, lanes of a tile]: the belief before each
// token, and r and the remainder of its step.
enum PathField { kPathS, kPathMu, kPathR, kPathRest, kPathFields };

// The same where slots share a variance, [chunk + 1, blocks, 2 + m, lanes of a tile]: variance and r of a block,
// and then the means of its slots.
enum BlockPathField { kBlockPathS, kBlockPathR, kBlockPathMu };

// What a slot adds to dk and dq.
template <class V>
struct SlotGrad {
  V dk, dq;
};

// The gradients of F slots from i on, each folded to a segment of one vector.
template <class T, int F, class Slot>
KLA_INLINE SlotGrad<Vec<T>> fold_slots(int i, Slot slot) {
  if constexpr (F == 1) {
    return slot(i);
  } else {
    const auto low = fold_slots<T, F / 2>(i, slot), high = fold_slots<T, F / 2>(i + F / 2, slot);
    constexpr auto lanes = std::make_integer_sequence<int, kLanes<T>>{};
    constexpr int S = 2 * kLanes<T> / F;
    return {fold<T, S>(low.dk, high.dk, lanes), fold<T, S>(low.dq, high.dq, lanes)};
  }
}

// What the adjoint of a group collects over slots, tiles and tokens.
template <class T>
struct Sums {
  T *acc_v, *acc_lam, *acc_dt;  // [chunk, lanes of a tile], sums over the slots so far
  T *dk, *dq;          // [chunk, G, blocks of kFold slots, lanes], sums over the tiles of a unit
  T *lam_dphi, *s_dy;  // [chunk * G, lanes], the same per block: what all its slots have in dk and dq

  Sums(Arena& arena, int64_t tokens, const kla_scan_params& p, int64_t tile, int64_t vectors) {
    for (T** x : {&acc_v, &acc_lam}) *x = arena.take<T>(tokens * tile);
    acc_dt = arena.take<T>(p.dt.data ? tokens * tile : 0);
    for (T** x : {&dk, &dq}) *x = arena.take<T>((tokens * vectors + kLanes<T>) * kLanes<T>);
    const int64_t blocks = p.G < p.N ? tokens * p.G + kLanes<T> : 0;
    for (T** x : {&lam_dphi, &s_dy}) *x = arena.take<T>(blocks * kLanes<T>);
  }

  template <int W>
  KLA_METHOD void load_token(const T* sum, int64_t j, bool begun, Vec<T>* x) const {
    for (int w = 0; w < W; ++w) x[w] = begun ? load(sum + (j * W + w) * kLanes<T>) : Vec<T>{};
  }

  // To the rows of a gradient when all slots are in.
  template <int W>
  KLA_METHOD void store_token(T* sum, int64_t j, int64_t d, bool done, const Vec<T>* x,
                              const Rows<T>& rows) const {
    constexpr int L = kLanes<T>;
    for (int w = 0; w < W; ++w) {
      if (done) store_any(rows.at(j, d + w * L), x[w]);
      else store(sum + (j * W + w) * L, x[w]);
    }
  }

  // dv is lam_v times what its sum collects.
  template <int W>
  KLA_METHOD void store_value(int64_t j, int64_t d, bool done, Vec<T>* x, const Vec<T>* lam_v,
                              const Rows<T>& rows) const {
    for (int w = 0; w < W; ++w) x[w] = done ? lam_v[w] * x[w] : x[w];
    store_token<W>(acc_v, j, d, done, x, rows);
  }

  KLA_METHOD void add(T* sum, int64_t slot, bool first, Vec<T> x) const {
    T* at = sum + slot * kLanes<T>;
    store(at, first ? x : load(at) + x);
  }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
