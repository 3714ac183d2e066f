// Forward pass: one task per (row, channel group) walks time chunk by chunk.
#ifndef KLA_CPU_FORWARD_H
#define KLA_CPU_FORWARD_H

#include "parallel.h"
#include "slots.h"
#include "stage.h"
#include "tile.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

template <class T, int W>
struct ForwardScratch {
  Stage<T> in;
  Tiles<T, W> state;
  T *y, *y_var;

  ForwardScratch(Arena& arena, const Scan& p, const Groups& groups, int block_fields)
      : in(arena, groups.pitch(), p), state(arena, p, block_fields, kForwardSlot, groups.width) {
    const int64_t rows = std::min<int64_t>(p.T, KLA_CHUNK);
    y = arena.take<T>(rows * in.pitch);
    y_var = arena.take<T>(p.y_var ? rows * in.pitch : 0);
  }
};

// Where the variances begin in the checkpoints.
template <class T>
KLA_INLINE T* saved_variances(const Scan& p) {
  return p.checkpoints ? static_cast<T*>(p.checkpoints) + num_chunks(p) * p.N * p.D : nullptr;
}

template <class M, class T, int W>
void forward_chunk(const Scan& p, const Row& row, int64_t c, int64_t d0, int64_t size,
                   ForwardScratch<T, W>& x) {
  constexpr int64_t kTile = W * kLanes<T>;
  x.in.begin_chunk(p, row, c, size);
  const ForwardRows<T> rows{x.in.read_channels(p.v, row, d0, kTile, x.in.v),
                            x.in.read_channels(p.lam_v, row, d0, kTile, x.in.lam_v),
                            x.in.read_gaps(p, row, d0, kTile),
                            x.in.write_channels(p, row, d0, kTile, p.y, p.v.dtype, x.y),
                            x.in.write_channels(p, row, d0, kTile, p.y_var, p.v.dtype, x.y_var)};
  const bool variance = M::kHasVariance && p.y_var;
  with_slots<M, W>(p.N, [&](auto slots) {
    for (int64_t d = 0; d < size; d += kTile) {
      if (variance) M::template forward<T, W, M::kHasVariance, slots>(x.in, rows, x.state, d);
      else M::template forward<T, W, false, slots>(x.in, rows, x.state, d);
    }
  });
  if (rows.y.data == x.y) x.in.store_channels(p, row, d0, x.y, p.y, p.v.dtype);
  if (p.y_var && rows.y_var.data == x.y_var) x.in.store_channels(p, row, d0, x.y_var, p.y_var, p.v.dtype);
}

template <class M, class T, int W>
void forward_task(const Scan& p, const Groups& groups, int64_t r, int64_t g,
                  ForwardScratch<T, W>& x) {
  const Row row = row_at(p, r);
  const int64_t d0 = groups.begin(g), size = groups.size(g);
  const auto read = [&](auto field, const void* src, int64_t at) {
    x.state.load(field, src, at, p.D, d0, size);
  };
  const auto write = [&](auto field, void* dst, int64_t at) {
    if (dst) x.state.store(field, dst, at, p.D, d0, size);
  };
  read(kA, p.a_bar, 0);
  read(kP, p.p_bar, 0);
  read(kMu, p.mean_0, r);
  read(kS, p.variance_0, r);
  for (int64_t c = 0; c < row.chunks(); ++c) {
    write(kMu, p.checkpoints, row.chunk0 + c);
    if (M::kHasVariance) write(kS, saved_variances<T>(p), row.chunk0 + c);
    forward_chunk<M, T, W>(p, row, c, d0, size, x);
  }
  write(kMu, p.mean, r);
  write(kS, p.variance, r);
}

template <class M, class T, int W>
int forward_rows(const Scan& p) {
  const int64_t threads = useful_threads(p);
  const Groups groups(p, threads, W * kLanes<T>);
  constexpr int kFields = M::kShared ? kSharedBlock : kForwardBlock;
  Arena measure(nullptr);
  ForwardScratch<T, W>(measure, p, groups, kFields);
  const Block block(measure.used() * static_cast<size_t>(threads));
  if (!block) return KLA_ERROR_MEMORY;
  auto task = [&](int64_t i, int worker) {
    Arena arena(block.data() + measure.used() * static_cast<size_t>(worker));
    ForwardScratch<T, W> x(arena, p, groups, kFields);
    forward_task<M, T, W>(p, groups, i / groups.count, i % groups.count, x);
  };
  parallel_for(threads, p.pool, p.R * groups.count, task);
  return KLA_OK;
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
