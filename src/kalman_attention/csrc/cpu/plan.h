// How a call is divided into rows, channel groups and chunks. Everything here depends on the shape alone and
// never on the number of threads, so that the bits are the same for every thread count.
#ifndef KLA_CPU_PLAN_H
#define KLA_CPU_PLAN_H

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>

#include "../kla_scan.h"
#include "vector.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

// A call whose rows may be split in time: each into the same number of segments, which then count as rows
// (R of them; the arrays [R, N, D] are per segment).
struct Scan : kla_scan_params {
  int64_t segments;

  Scan(const kla_scan_params& p, int64_t segments_) : kla_scan_params(p), segments(segments_) {
    R *= segments;
  }
};

// One row of the batch, one packed document, or a segment of either.
struct Row {
  int64_t b, t0, length;  // tokens [t0, t0 + length) of batch entry b
  int64_t chunk0;         // its first slot in the checkpoints
  int64_t chunks() const { return (length + KLA_CHUNK - 1) / KLA_CHUNK; }
};

KLA_INLINE Row whole_row(const kla_scan_params& p, int64_t r) {
  if (p.cu_seqlens == nullptr) return {r, 0, p.T, r * ((p.T + KLA_CHUNK - 1) / KLA_CHUNK)};
  const int64_t t0 = p.cu_seqlens[r];
  return {0, t0, p.cu_seqlens[r + 1] - t0, t0 / KLA_CHUNK + r};
}

// Segments are whole chunks, the same number in each except the last ones.
KLA_INLINE Row row_at(const Scan& p, int64_t r) {
  const Row row = whole_row(p, r / p.segments);
  const int64_t step = (row.chunks() + p.segments - 1) / p.segments;
  const int64_t c0 = std::min(row.chunks(), r % p.segments * step);
  const int64_t begin = std::min(row.length, c0 * KLA_CHUNK);
  const int64_t end = std::min(row.length, (c0 + step) * KLA_CHUNK);
  return {row.b, row.t0 + begin, end - begin, row.chunk0 + c0};
}

KLA_INLINE int64_t num_chunks(const Scan& p) {
  const int64_t rows = p.R / p.segments;
  return p.cu_seqlens ? p.T / KLA_CHUNK + rows : p.B * ((p.T + KLA_CHUNK - 1) / KLA_CHUNK);
}

// Number of segments into which the rows of a call are split; 1 means not at all. A split call takes 2.1 times
// as long forward on one thread and 1.5 times backward, so with K tiles it pays from about 2 K threads on: more
// than two tiles would need more threads than most machines have. 16 segments occupy 16 threads; 512 tokens
// keep the pass over the summaries short compared with a segment.
KLA_INLINE int64_t segments_of(const kla_scan_params& p, int64_t tile) {
  constexpr int64_t kMostTiles = 2, kMostSegments = 16, kLeastTokens = 512;
  if (p.R * ((p.D + tile - 1) / tile) > kMostTiles || p.T < 8 * kLeastTokens) return 1;
  return std::min(kMostSegments, p.T / kLeastTokens);
}

// Allocates cache-line aligned arrays from one block; with a null block it only measures.
class Arena {
 public:
  explicit Arena(char* block) : block_(block) {}
  template <class T>
  T* take(int64_t count) {
    T* at = block_ ? reinterpret_cast<T*>(block_ + used_) : nullptr;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return at;
  }
  size_t used() const { return used_; }

 private:
  char* block_;
  size_t used_ = 0;
};

// An aligned allocation that reports failure instead of throwing: no exception may cross the C ABI.
class Block {
 public:
  explicit Block(size_t bytes) {
    const size_t rounded = (bytes + 63) / 64 * 64;
    if (rounded >= bytes) data_ = static_cast<char*>(::operator new(rounded, kAlignment, std::nothrow));
  }
  ~Block() { ::operator delete(data_, kAlignment); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  char* data() const { return data_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  char* data_ = nullptr;
};

// With less work than this (some 30 us of a forward pass) waking another thread costs more than it gains.
constexpr int64_t kMinUpdatesPerThread = 100000;

KLA_INLINE int64_t useful_threads(const kla_scan_params& p) {
  const double updates = static_cast<double>(p.B) * p.T * p.N * p.D;
  const double cap = updates / kMinUpdatesPerThread;
  return std::max<int64_t>(1, cap < static_cast<double>(p.threads) ? static_cast<int64_t>(cap) : p.threads);
}

// Channels are divided into units. dk and dq are first summed over a unit, so its width must depend on the
// shape alone. A task takes a run of adjacent units, of any length, because every unit is computed in the
// same way. Long runs (up to 192 channels) touch fewer pages per token, short runs give more tasks: four per
// thread. Units of 64 channels are halved down to single tiles while a call has fewer than 8 of them; 32
// channels throughout would cost 4.5 % in the backward pass.
struct Groups {
  int64_t D, unit, units;
  int64_t width, count;  // channels per task, tasks per row

  Groups(const Scan& p, int64_t threads, int64_t tile) : D(p.D), unit(64) {
    while (unit > tile && p.R * ((p.D + unit - 1) / unit) < 8) unit /= 2;
    units = (p.D + unit - 1) / unit;
    const int64_t longest = std::min<int64_t>(units, 192 / unit);
    const int64_t run = std::max<int64_t>(1, std::min(longest, p.R * units / (4 * threads)));
    width = run * unit;
    count = (units + run - 1) / run;
  }
  int64_t begin(int64_t g) const { return g * width; }
  int64_t size(int64_t g) const { return std::min(width, D - begin(g)); }
  // Row length of staged arrays: a little more than the width, because rows a power of two apart would all
  // map to the same cache sets.
  int64_t pitch() const { return width + 16; }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
