// Backward pass: chunks in reverse, each replayed from its checkpoint and then walked backwards with
// the scalar adjoints of mean and variance.
#ifndef KLA_CPU_BACKWARD_H
#define KLA_CPU_BACKWARD_H

#include "forward.h"
#include "waves.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

// Slots replayed at a time: enough chains to hide latency, few enough for the trajectory to stay close.
constexpr int64_t kSlotBlock = 16;

// Copies of the rows that cannot be used where they are.
template <class T>
struct ChannelCopies {
  T *dy, *dy_var, *dv, *dlam_v;  // [chunk, pitch]

  ChannelCopies(Arena& arena, int64_t tokens, int64_t pitch) {
    for (T** x : {&dy, &dy_var, &dv, &dlam_v}) *x = arena.take<T>(tokens * pitch);
  }

  ChannelRows<T> rows(const Scan& p, const kla_scan_grads& g, const Stage<T>& in, const Row& row, int64_t d0,
                      int64_t tile) const {
    return {in.read_channels(p.v, row, d0, tile, in.v),
            in.read_channels(p.lam_v, row, d0, tile, in.lam_v),
            in.read_channels(g.dy, row, d0, tile, dy),
            in.read_channels(g.dy_var, row, d0, tile, dy_var),
            in.write_channels(p, row, d0, tile, g.dv, p.v.dtype, dv),
            in.write_channels(p, row, d0, tile, g.dlam_v, p.lam_v.dtype, dlam_v)};
  }

  void store(const Scan& p, const kla_scan_grads& g, const Stage<T>& in, const Row& row, int64_t d0,
             const ChannelRows<T>& rows) const {
    if (rows.dv.data == dv) in.store_channels(p, row, d0, dv, g.dv, p.v.dtype);
    if (rows.dlam_v.data == dlam_v) in.store_channels(p, row, d0, dlam_v, g.dlam_v, p.lam_v.dtype);
  }
};

template <class T, int W>
struct BackwardScratch {
  Stage<T> in;
  Tiles<T, W> state;
  Sums<T> sums;
  ChannelCopies<T> copies;
  T* path;
  T* slot_sums;

  BackwardScratch(Arena& arena, const Scan& p, const Groups& groups)
      : in(arena, groups.pitch(), p.N, p.T),
        state(arena, p.N, kBackwardFields, groups.width),
        sums(arena, std::min<int64_t>(p.T, KLA_CHUNK), p.N, W * kLanes<T>),
        copies(arena, std::min<int64_t>(p.T, KLA_CHUNK), in.pitch) {
    const int64_t tokens = std::min<int64_t>(p.T, KLA_CHUNK);
    path = arena.take<T>((tokens + 1) * std::min(p.N, kSlotBlock) * kPathFields * W * kLanes<T>);
    slot_sums = arena.take<T>(tokens * p.N + kLanes<T>);
  }
};

// Sums that several tasks contribute to, each in a place of its own.
template <class T>
struct Partials {
  T *dk, *dq;        // [units, tokens of the wave, N]
  double *da, *dp;   // [rows of the wave, N, D]
  double *da_total, *dp_total;  // [N, D]
  int64_t tokens;

  Partials(Arena& arena, const Scan& p, const Groups& groups, const Waves& waves)
      : tokens(waves.max_tokens()) {
    for (T** x : {&dk, &dq}) *x = arena.take<T>(groups.units * tokens * p.N);
    for (double** x : {&da, &dp}) *x = arena.take<double>(waves.max_rows() * p.N * p.D);
    for (double** x : {&da_total, &dp_total}) *x = arena.take<double>(p.N * p.D);
  }
};

template <class M, class T, int W>
struct Backward {
  const Scan& p;
  const kla_scan_grads& g;
  const int64_t threads;
  const Groups groups;
  const Waves waves;
  Partials<T>* partials = nullptr;

  Backward(const Scan& params, const kla_scan_grads& grads)
      : p(params),
        g(grads),
        threads(useful_threads(params)),
        groups(params, threads, W * kLanes<T>),
        waves(params, groups) {}

  using Scratch = BackwardScratch<T, W>;

  void adjoint_unit(int64_t begin, int64_t end, const ChannelRows<T>& rows, Scratch& x) const {
    for (int64_t d = begin; d < end; d += W * kLanes<T>)
      for (int64_t n0 = 0; n0 < p.N; n0 += kSlotBlock) {
        const int64_t n1 = std::min(p.N, n0 + kSlotBlock);
        with_slots<W>(n1 - n0, [&](auto slots) {
          if constexpr (slots <= kSlotBlock) adjoint_tile<slots>(rows, d, n0, n1, d == begin, x);
        });
      }
  }

  template <int SLOTS>
  void adjoint_tile(const ChannelRows<T>& rows, int64_t d, int64_t n0, int64_t n1, bool first,
                    Scratch& x) const {
    M::template replay<T, W, SLOTS>(x.in, rows, x.state, d, n0, n1, x.path);
    if (M::kHasVariance && g.dy_var.data)
      M::template adjoint<T, W, M::kHasVariance, SLOTS>(x.in, rows, x.state, d, n0, n1, x.path, first, x.sums);
    else
      M::template adjoint<T, W, false, SLOTS>(x.in, rows, x.state, d, n0, n1, x.path, first, x.sums);
  }

  // Adds up the lanes of the slot sums and files them under the tokens of the wave.
  void store_slot_sums(const T* vectors, Scratch& x, T* out) const {
    row_sums(vectors, x.in.count * p.N, x.slot_sums);
    const size_t bytes = static_cast<size_t>(p.N) * sizeof(T);
    for (int64_t t = 0, j = 0; t < x.in.tokens; ++t) {
      if (j < x.in.count && x.in.live[j] == t)
        memcpy(out + t * p.N, x.slot_sums + j++ * p.N, bytes);
      else
        memset(out + t * p.N, 0, bytes);
    }
  }

  void backward_chunk(const Wave& wave, const Row& row, int64_t r, int64_t group, int64_t c,
                      Scratch& x) const {
    const int64_t d0 = groups.begin(group), size = groups.size(group), nd = p.N * p.D;
    const int64_t chunk = row.chunk0 + c;
    x.state.load(kMu, state_row<T>(p.checkpoints, p, chunk), p.D, d0, size);
    if (M::kHasVariance)
      x.state.load(kS, state_row<T>(p.checkpoints, p, num_chunks(p) + chunk), p.D, d0, size);
    x.state.load(kDa, nullptr, p.D, d0, size);
    x.state.load(kDp, nullptr, p.D, d0, size);
    x.in.begin_chunk(p, row, c, size);
    const ChannelRows<T> rows = x.copies.rows(p, g, x.in, row, d0, W * kLanes<T>);
    const int64_t token = waves.offset(wave, r) + c * KLA_CHUNK - wave.begin();
    for (int64_t d = 0; d < size; d += groups.unit) {
      adjoint_unit(d, std::min(size, d + groups.unit), rows, x);
      const int64_t at = ((d0 + d) / groups.unit * partials->tokens + token) * p.N;
      store_slot_sums(x.sums.dk, x, partials->dk + at);
      store_slot_sums(x.sums.dq, x, partials->dq + at);
    }
    x.copies.store(p, g, x.in, row, d0, rows);
    x.state.add_to(kDa, partials->da + (r - wave.r0) * nd, p.D, d0, size);
    if (M::kHasVariance) x.state.add_to(kDp, partials->dp + (r - wave.r0) * nd, p.D, d0, size);
  }

  void clear_dynamics(int64_t row, int64_t d0, int64_t size) const {
    for (int64_t n = 0; n < p.N; ++n)
      for (double* sum : {partials->da, partials->dp}) {
        double* x = sum + (row * p.N + n) * p.D + d0;
        std::fill(x, x + size, 0.0);
      }
  }

  void task(const Wave& wave, int64_t r, int64_t group, Scratch& x) const {
    const Row row = row_at(p, r);
    const int64_t end = std::min(wave.c1, row.chunks());
    if (end <= wave.c0 && wave.c0 > 0) return;
    const int64_t d0 = groups.begin(group), size = groups.size(group);
    const auto read = [&](int field, const void* src, int64_t at) {
      x.state.load(field, state_row<T>(src, p, at), p.D, d0, size);
    };
    const auto write = [&](int field, void* dst) {
      x.state.store(field, state_row<T>(dst, p, r), p.D, d0, size);
    };
    const bool last = end == row.chunks();  // nothing of this row has been walked yet
    if (last) clear_dynamics(r - wave.r0, d0, size);
    read(kA, p.a_bar, 0);
    read(kP, p.p_bar, 0);
    read(kDmu, last ? g.dmean : g.dmean_0, r);
    read(kDs, last ? g.dvariance : g.dvariance_0, r);
    for (int64_t c = end - 1; c >= wave.c0; --c) backward_chunk(wave, row, r, group, c, x);
    write(kDmu, g.dmean_0);
    if (M::kHasVariance) write(kDs, g.dvariance_0);
  }

  // Second round of a wave: sums over units, in order, for one row.
  void reduce_slots(const Wave& wave, int64_t r, const T* partial, void* out, int64_t dtype) const {
    const Row row = row_at(p, r);
    const int64_t count = (wave.end(row) - wave.begin()) * p.N;
    const T* from = partial + waves.offset(wave, r) * p.N;
    const int64_t to = (row.b * p.T + row.t0 + wave.begin()) * p.N;
    constexpr int64_t kBlock = 512;
    T sum[kBlock];
    with_type(out, dtype, [&](auto* data) {
      for (int64_t i = 0; i < count; i += kBlock) {
        const int64_t length = std::min(kBlock, count - i);
        std::fill(sum, sum + length, T(0));
        for (int64_t unit = 0; unit < groups.units; ++unit) {
          const T* x = from + unit * partials->tokens * p.N + i;
          for (int64_t j = 0; j < length; ++j) sum[j] += x[j];
        }
        encode_row(sum, length, data + to + i);
      }
    });
  }

  // Sums over rows, in order; a task takes one slot.
  void reduce_dynamics(int64_t rows) const {
    const int64_t nd = p.N * p.D;
    auto reduce = [&](int64_t n, int) {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = n * p.D; i < (n + 1) * p.D; ++i) {
          partials->da_total[i] += partials->da[r * nd + i];
          if (M::kHasVariance) partials->dp_total[i] += partials->dp[r * nd + i];
        }
    };
    parallel_for(threads, p.pool, p.N, reduce);
  }

  void store_dynamics() const {
    for (int64_t i = 0; i < p.N * p.D; ++i) {
      static_cast<T*>(g.da_bar)[i] = static_cast<T>(partials->da_total[i]);
      if (M::kHasVariance) static_cast<T*>(g.dp_bar)[i] = static_cast<T>(partials->dp_total[i]);
    }
  }

  void run_wave(const Wave& wave, char* scratch, size_t stride) const {
    auto walk = [&](int64_t i, int worker) {
      Arena arena(scratch + stride * static_cast<size_t>(worker));
      Scratch x(arena, p, groups);
      task(wave, wave.r0 + i / groups.count, i % groups.count, x);
    };
    parallel_for(threads, p.pool, (wave.r1 - wave.r0) * groups.count, walk);
    auto reduce = [&](int64_t i, int) {
      const int64_t r = wave.r0 + i / 2;
      if (wave.end(row_at(p, r)) <= wave.begin()) return;
      if (i % 2 == 0) reduce_slots(wave, r, partials->dk, g.dk, p.k.dtype);
      if (i % 2 == 1) reduce_slots(wave, r, partials->dq, g.dq, p.q.dtype);
    };
    parallel_for(threads, p.pool, (wave.r1 - wave.r0) * 2, reduce);
  }

  int run() {
    const int64_t nd = p.N * p.D;
    Arena measure(nullptr), shared(nullptr);
    Scratch(measure, p, groups);
    Partials<T>(shared, p, groups, waves);
    const Block scratch(measure.used() * static_cast<size_t>(threads)), block(shared.used());
    if (!scratch || !block) return KLA_ERROR_MEMORY;
    Arena arena(block.data());
    Partials<T> sums(arena, p, groups, waves);
    partials = &sums;
    std::fill(sums.da_total, sums.da_total + nd, 0.0);
    std::fill(sums.dp_total, sums.dp_total + nd, 0.0);
    for (int64_t r0 = 0, r1; r0 < p.R; r0 = r1) {
      r1 = waves.rows_end(r0);
      const int64_t chunks = waves.chunks(r0, r1), slice = waves.slice(r0, r1);
      int64_t c0 = chunks == 0 ? 0 : (chunks - 1) / slice * slice;
      for (; c0 >= 0; c0 -= slice)
        run_wave({r0, r1, c0, std::min(chunks, c0 + slice)}, scratch.data(), measure.used());
      reduce_dynamics(r1 - r0);
    }
    store_dynamics();
    return KLA_OK;
  }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
