// The inputs of one chunk and one channel group as small dense arrays of the compute type. Dtypes, strides, masks
// and partial tiles are handled here; the core loops see none of them.
#ifndef KLA_CPU_STAGE_H
#define KLA_CPU_STAGE_H

#include <type_traits>

#include "../lane.h"
#include "convert.h"
#include "plan.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

// Rows of channels, one per real token: the user's memory where possible, otherwise a copy.
template <class T>
struct Rows {
  T* data;
  int64_t pitch;
  T* at(int64_t j, int64_t d) const { return data + j * pitch + d; }

  // Rows are pages apart, beyond the reach of hardware prefetching, so each tile prefetches the next one, above all
  // the rows that it will write: a store that waits for its cache line delays all those after it. Beyond the last
  // channel the address is outside of the array, which is harmless for a prefetch.
  KLA_METHOD void prefetch(int64_t j, int64_t d) const { __builtin_prefetch(at(j, d), !std::is_const_v<T>, 2); }
};

// The rows of one chunk in the forward pass.
template <class T>
struct ForwardRows {
  Rows<const T> v, lam_v, dt;
  Rows<T> y, y_var;

  template <bool VAR, bool GAPS>
  KLA_METHOD void prefetch(int64_t j, int64_t next) const {
    for (const auto& x : {v, lam_v}) x.prefetch(j, next);
    if (GAPS) dt.prefetch(j, next);
    y.prefetch(j, next);
    if (VAR) y_var.prefetch(j, next);
  }
};

// The rows of one chunk in the backward pass.
template <class T>
struct ChannelRows {
  Rows<const T> v, lam_v, dt, dy, dy_var;
  Rows<T> dv, dlam_v, ddt;

  template <bool GAPS>
  KLA_METHOD void prefetch_replay(int64_t j, int64_t next) const {
    for (const auto& x : {v, lam_v}) x.prefetch(j, next);
    if (GAPS) dt.prefetch(j, next);
  }
  template <bool VAR, bool GAPS>
  KLA_METHOD void prefetch_adjoint(int64_t j, int64_t next) const {
    dy.prefetch(j, next);
    if (VAR) dy_var.prefetch(j, next);
    for (const auto& x : {dv, dlam_v}) x.prefetch(j, next);
    if (GAPS) ddt.prefetch(j, next);
  }
};

template <class T>
struct Stage {
  int64_t pitch, N, G;   // row length of the channel arrays, of the slot arrays and of those of blocks
  int64_t size = 0;      // channels in use
  int64_t count = 0;     // live tokens: a masked token is simply not there
  int64_t begin = 0;     // first token of the chunk
  int64_t tokens = 0;    // tokens of the chunk, masked ones included
  int32_t live[KLA_CHUNK];
  T *v, *lam_v, *dt;     // [chunk, pitch]
  T *k, *q;              // [chunk, N]
  T *k2, *q2;            // [chunk, G], sums of k^2 and q^2 over the slots of a block

  Stage(Arena& arena, int64_t pitch_, const kla_scan_params& p) : pitch(pitch_), N(p.N), G(p.G) {
    const int64_t rows = std::min<int64_t>(p.T, KLA_CHUNK);
    for (T** x : {&v, &lam_v}) *x = arena.take<T>(rows * pitch);
    dt = arena.take<T>(p.dt.data ? rows * pitch : 0);
    for (T** x : {&k, &q}) *x = arena.take<T>(rows * N);
    for (T** x : {&k2, &q2}) *x = arena.take<T>(rows * G);
  }

  void find_live(const Scan& p, const Row& row, int64_t chunk) {
    begin = row.t0 + chunk * KLA_CHUNK;
    tokens = std::min<int64_t>(row.length - chunk * KLA_CHUNK, KLA_CHUNK);
    count = 0;
    const char* mask = static_cast<const char*>(p.mask.data);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t at = row.b * p.mask.stride_b + (begin + t) * p.mask.stride_t;
      if (mask == nullptr || mask[at]) live[count++] = static_cast<int32_t>(t);
    }
  }

  // dst[j, :] = columns [first, first + size) of live token j of x, zero up to padded.
  void load_rows(const kla_array& x, const Row& row, int64_t first, int64_t size, int64_t padded,
                 T* dst) const {
    with_type(x.data, x.dtype, [&](const auto* data) {
      const auto* src = data + row.b * x.stride_b + begin * x.stride_t + first;
      for (int64_t j = 0; j < count; ++j)
        decode_row(src + live[j] * x.stride_t, size, padded, dst + j * padded);
    });
  }

  // A missing array reads as zero.
  void load_channels(const kla_array& x, const Row& row, int64_t d0, T* dst) const {
    if (x.data == nullptr) std::fill(dst, dst + count * pitch, T(0));
    else load_rows(x, row, d0, size, pitch, dst);
  }

  // Whether channels [d0, d0 + size) can be used where they are: no conversion, no masked token to
  // skip, no ragged tile to pad.
  bool in_place(int64_t dtype, int64_t tile) const {
    return dtype == (sizeof(T) == 4 ? KLA_FLOAT32 : KLA_FLOAT64) && count == tokens && size % tile == 0;
  }

  Rows<const T> read_channels(const kla_array& x, const Row& row, int64_t d0, int64_t tile, T* copy) const {
    if (x.data && in_place(x.dtype, tile))
      return {static_cast<const T*>(x.data) + row.b * x.stride_b + begin * x.stride_t + d0, x.stride_t};
    load_channels(x, row, d0, copy);
    return {copy, pitch};
  }

  void load_slots(const kla_array& x, const Row& row, T* dst) const {
    load_rows(x, row, 0, N, N, dst);
  }

  // The gaps before the tokens; nothing where the call has none.
  Rows<const T> read_gaps(const Scan& p, const Row& row, int64_t d0, int64_t tile) const {
    if (p.dt.data == nullptr) return {nullptr, 0};
    if (p.dt_channels == p.D) return read_channels(p.dt, row, d0, tile, dt);
    load_rows(p.dt, row, 0, 1, pitch, dt);
    for (int64_t j = 0; j < count; ++j) std::fill(dt + j * pitch + 1, dt + (j + 1) * pitch, dt[j * pitch]);
    return {dt, pitch};
  }

  // What is common to all channels.
  void begin_chunk(const Scan& p, const Row& row, int64_t chunk, int64_t size_) {
    size = size_;
    find_live(p, row, chunk);
    load_slots(p.k, row, k);
    load_slots(p.q, row, q);
    add_squares(k, k2);
    add_squares(q, q2);
  }

  void add_squares(const T* x, T* sums) const {
    const int64_t m = N / G;
    if (m >= kParts) return add_many_squares(x, m, sums);
    for (int64_t i = 0; i < count * G; ++i) {
      sums[i] = x[i * m] * x[i * m];
      for (int64_t n = 1; n < m; ++n) sums[i] += x[i * m + n] * x[i * m + n];
    }
  }

  // Long sums in several independent parts: a single one would wait for each of its additions.
  static constexpr int kParts = 16;
  void add_many_squares(const T* x, int64_t m, T* sums) const {
    for (int64_t i = 0; i < count * G; ++i, x += m) {
      T part[kParts] = {}, sum = 0;
      int64_t n = 0;
      for (; n + kParts <= m; n += kParts)
        for (int j = 0; j < kParts; ++j) part[j] += x[n + j] * x[n + j];
      for (; n < m; ++n) sum += x[n] * x[n];
      for (int j = 0; j < kParts; ++j) sum += part[j];
      sums[i] = sum;
    }
  }

  // Where to collect rows of a contiguous [B, T, D] output before store_channels, which then has
  // nothing left to do if they are in place.
  Rows<T> write_channels(const Scan& p, const Row& row, int64_t d0, int64_t tile, void* out, int64_t dtype,
                         T* copy) const {
    if (out == nullptr || !in_place(dtype, tile)) return {copy, pitch};
    return {static_cast<T*>(out) + (row.b * p.T + begin) * p.D + d0, p.D};
  }

  // Writes src[j, :] to the live tokens of a contiguous [B, T, D] array and zeros to the masked ones.
  void store_channels(const Scan& p, const Row& row, int64_t d0, const T* src, void* out,
                      int64_t dtype) const {
    with_type(out, dtype, [&](auto* data) {
      auto* dst = data + (row.b * p.T + begin) * p.D + d0;
      for (int64_t t = 0, j = 0; t < tokens; ++t, dst += p.D) {
        if (j < count && live[j] == t)
          encode_row(src + j++ * pitch, size, dst);
        else
          memset(dst, 0, static_cast<size_t>(size) * sizeof(*dst));
      }
    });
  }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
