// Backward pass: chunks in reverse, each replayed from its checkpoint and then walked backwards with
// the scalar adjoints of mean and variance.
#ifndef KLA_CPU_BACKWARD_H
#define KLA_CPU_BACKWARD_H

#include "forward.h"
#include "waves.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

// Slots replayed at a time: enough independent chains to hide latency, few enough that the trajectory of a tile
// (266 KB for 64 tokens of 16 slots with AVX-512) stays in L2. Blocks of 8 were no faster.
constexpr int64_t kSlotBlock = 16;

// Gradients per token and channel that the walk writes, [B, T, D].
struct Target {
  void* out;
  int64_t dtype;
};
struct Targets {
  Target dv, dlam_v, ddt;
};

// Copies of the rows that cannot be used in place.
template <class T>
struct ChannelCopies {
  T *dy, *dy_var, *dv, *dlam_v, *ddt;  // [chunk, pitch]

  ChannelCopies(Arena& arena, const kla_scan_params& p, int64_t tokens, int64_t pitch) {
    for (T** x : {&dy, &dy_var, &dv, &dlam_v}) *x = arena.take<T>(tokens * pitch);
    ddt = arena.take<T>(p.dt.data ? tokens * pitch : 0);
  }

  ChannelRows<T> rows(const Scan& p, const kla_scan_grads& g, const Targets& to, const Stage<T>& in, const Row& row,
                      int64_t d0, int64_t tile) const {
    const auto write = [&](const Target& x, T* copy) {
      return in.write_channels(p, row, d0, tile, x.out, x.dtype, copy);
    };
    return {in.read_channels(p.v, row, d0, tile, in.v),
            in.read_channels(p.lam_v, row, d0, tile, in.lam_v),
            in.read_gaps(p, row, d0, tile),
            in.read_channels(g.dy, row, d0, tile, dy),
            in.read_channels(g.dy_var, row, d0, tile, dy_var),
            write(to.dv, dv),
            write(to.dlam_v, dlam_v),
            write(to.ddt, ddt)};
  }

  void store(const Scan& p, const Targets& to, const Stage<T>& in, const Row& row, int64_t d0,
             const ChannelRows<T>& rows) const {
    const auto put = [&](const Target& x, const Rows<T>& from, T* copy) {
      if (x.out && from.data == copy) in.store_channels(p, row, d0, copy, x.out, x.dtype);
    };
    put(to.dv, rows.dv, dv);
    put(to.dlam_v, rows.dlam_v, dlam_v);
    put(to.ddt, rows.ddt, ddt);
  }
};

template <class T, int W>
struct BackwardScratch {
  Stage<T> in;
  Tiles<T, W> state;
  Sums<T> sums;
  ChannelCopies<T> copies;
  T* path;
  T *slot_sums, *block_sums;

  // Slots are padded in every block to whole vectors of folded sums.
  BackwardScratch(Arena& arena, const Scan& p, const Groups& groups, int64_t path_fields, int64_t padded, int fold)
      : in(arena, groups.pitch(), p),
        state(arena, p, kBackwardBlock, kBackwardSlot, groups.width),
        sums(arena, std::min<int64_t>(p.T, KLA_CHUNK), p, W * kLanes<T>, padded / fold),
        copies(arena, p, std::min<int64_t>(p.T, KLA_CHUNK), in.pitch) {
    const int64_t tokens = std::min<int64_t>(p.T, KLA_CHUNK);
    path = arena.take<T>((tokens + 1) * path_fields * W * kLanes<T>);
    slot_sums = arena.take<T>(tokens * padded + kLanes<T>);
    block_sums = arena.take<T>(tokens * p.G + kLanes<T>);
  }
};

// Sums that several tasks contribute to, each in separate memory. They depend neither on the model nor on the
// width of tiles, so that the loops that add them up are compiled only once per type.
template <class T>
struct Partials {
  const Scan& p;
  const Waves& waves;
  const int64_t units, tokens;
  T *dk, *dq;        // [units, tokens of the wave, N]
  double *da, *dp;   // [rows of the wave, G, D]
  double *da_total, *dp_total;  // [G, D]

  Partials(Arena& arena, const Scan& scan, const Groups& groups, const Waves& all)
      : p(scan), waves(all), units(groups.units), tokens(all.max_tokens()) {
    for (T** x : {&dk, &dq}) *x = arena.take<T>(units * tokens * p.N);
    for (double** x : {&da, &dp}) *x = arena.take<double>(waves.max_rows() * p.G * p.D);
    for (double** x : {&da_total, &dp_total}) *x = arena.take<double>(p.G * p.D);
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
        for (int64_t unit = 0; unit < units; ++unit) {
          const T* x = from + unit * tokens * p.N + i;
          for (int64_t j = 0; j < length; ++j) sum[j] += x[j];
        }
        encode_row(sum, length, data + to + i);
      }
    });
  }
};

// Sums ddt over the channels that share a gap, each token in the order of its channels.
template <class T>
void reduce_gaps(const Scan& p, const void* channels, void* ddt, int64_t threads) {
  const T* from = static_cast<const T*>(channels);
  with_type(ddt, p.dt.dtype, [&](auto* out) {
    auto reduce = [&](int64_t row, int) {
      for (int64_t t = row * p.T; t < (row + 1) * p.T; ++t) {
        double sum = 0;
        for (int64_t d = 0; d < p.D; ++d) sum += from[t * p.D + d];
        encode(static_cast<T>(sum), out + t);
      }
    };
    parallel_for(threads, p.pool, p.B, reduce);
  });
}

template <class M, class T, int W>
struct Backward {
  const Scan& p;
  const kla_scan_grads& g;
  const int64_t threads;
  const Groups groups;
  const Waves waves;
  const int64_t slots_at_once;  // whole blocks, as near to kSlotBlock as they come
  Partials<T>* partials = nullptr;
  Targets targets{};

  Backward(const Scan& params, const kla_scan_grads& grads)
      : p(params),
        g(grads),
        threads(useful_threads(params)),
        groups(params, threads, W * kLanes<T>),
        waves(params, groups),
        slots_at_once(std::min(p.N, std::max<int64_t>(1, kSlotBlock * p.G / p.N) * (p.N / p.G))) {}

  using Scratch = BackwardScratch<T, W>;
  static constexpr int kFold = M::template kFold<T>;
  int64_t block_slots() const { return p.N / p.G; }
  int64_t padded() const { return (block_slots() + kFold - 1) / kFold * kFold; }
  Scratch make_scratch(Arena& arena) const {
    return Scratch(arena, p, groups, M::path_fields(slots_at_once, block_slots()), p.G * padded(), kFold);
  }

  void adjoint_unit(int64_t begin, int64_t end, const ChannelRows<T>& rows, Scratch& x) const {
    for (int64_t d = begin; d < end; d += W * kLanes<T>)
      for (int64_t n0 = 0; n0 < p.N; n0 += slots_at_once) {
        const int64_t n1 = std::min(p.N, n0 + slots_at_once);
        with_slots<M, W>(n1 - n0, [&](auto slots) {
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

  // Adds up the lanes of the slot sums, and of what the slots of a block share, which is multiplied by 2 k or 2 q.
  // Stores them by the tokens of the wave.
  void store_slot_sums(const T* vectors, const T* shared, const T* factor, Scratch& x, T* out) const {
    const int64_t blocks = x.in.count * p.G, m = block_slots();
    row_sums<kFold>(vectors, blocks * padded(), x.slot_sums);
    if (padded() > m)
      for (int64_t i = 1; i < blocks; ++i) std::copy_n(x.slot_sums + i * padded(), m, x.slot_sums + i * m);
    if (shared) {
      row_sums(shared, blocks, x.block_sums);
      for (int64_t i = 0, n = 0; i < blocks; ++i)
        for (const T sum = 2 * x.block_sums[i]; n < (i + 1) * m; ++n) x.slot_sums[n] += factor[n] * sum;
    }
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
    const int64_t d0 = groups.begin(group), size = groups.size(group), gd = p.G * p.D;
    const int64_t chunk = row.chunk0 + c;
    x.state.load(kMu, p.checkpoints, chunk, p.D, d0, size);
    if (M::kHasVariance) x.state.load(kS, saved_variances<T>(p), chunk, p.D, d0, size);
    x.state.fill(kDa, T(0), size);
    x.state.fill(kDp, T(0), size);
    x.in.begin_chunk(p, row, c, size);
    const ChannelRows<T> rows = x.copies.rows(p, g, targets, x.in, row, d0, W * kLanes<T>);
    const int64_t token = waves.offset(wave, r) + c * KLA_CHUNK - wave.begin();
    for (int64_t d = 0; d < size; d += groups.unit) {
      adjoint_unit(d, std::min(size, d + groups.unit), rows, x);
      if (M::kSmooths) continue;
      const int64_t at = ((d0 + d) / groups.unit * partials->tokens + token) * p.N;
      store_slot_sums(x.sums.dk, M::kShared ? x.sums.lam_dphi : nullptr, x.in.k, x, partials->dk + at);
      const bool variance = M::kShared && g.dy_var.data;
      store_slot_sums(x.sums.dq, variance ? x.sums.s_dy : nullptr, x.in.q, x, partials->dq + at);
    }
    x.copies.store(p, targets, x.in, row, d0, rows);
    if (M::kSmooths) return;
    x.state.add_to(kDa, partials->da + (r - wave.r0) * gd, p.D, d0, size);
    if (M::kHasVariance) x.state.add_to(kDp, partials->dp + (r - wave.r0) * gd, p.D, d0, size);
  }

  void clear_dynamics(int64_t row, int64_t d0, int64_t size) const {
    for (int64_t i = 0; i < p.G; ++i)
      for (double* sum : {partials->da, partials->dp}) {
        double* x = sum + (row * p.G + i) * p.D + d0;
        std::fill(x, x + size, 0.0);
      }
  }

  void task(const Wave& wave, int64_t r, int64_t group, Scratch& x) const {
    const Row row = row_at(p, r);
    const int64_t end = std::min(wave.c1, row.chunks());
    if (end <= wave.c0 && wave.c0 > 0) return;
    const int64_t d0 = groups.begin(group), size = groups.size(group);
    const auto read = [&](auto field, const void* src, int64_t at) {
      x.state.load(field, src, at, p.D, d0, size);
    };
    const auto write = [&](auto field, void* dst) { x.state.store(field, dst, r, p.D, d0, size); };
    const bool last = end == row.chunks();  // the first wave of this row
    if (last) clear_dynamics(r - wave.r0, d0, size);
    read(kA, p.a_bar, 0);
    read(kP, p.p_bar, 0);
    read(kDmu, last ? g.dmean : g.dmean_0, r);
    read(kDs, last ? g.dvariance : g.dvariance_0, r);
    for (int64_t c = end - 1; c >= wave.c0; --c) backward_chunk(wave, row, r, group, c, x);
    write(kDmu, g.dmean_0);
    if (M::kHasVariance) write(kDs, g.dvariance_0);
  }

  // Sums over rows, in order; a task takes one block of slots.
  void reduce_dynamics(int64_t rows) const {
    const int64_t gd = p.G * p.D;
    auto reduce = [&](int64_t block, int) {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = block * p.D; i < (block + 1) * p.D; ++i) {
          partials->da_total[i] += partials->da[r * gd + i];
          if (M::kHasVariance) partials->dp_total[i] += partials->dp[r * gd + i];
        }
    };
    parallel_for(threads, p.pool, p.G, reduce);
  }

  void store_dynamics() const {
    for (int64_t i = 0; i < p.G * p.D; ++i) {
      static_cast<T*>(g.da_bar)[i] = static_cast<T>(partials->da_total[i]);
      if (M::kHasVariance) static_cast<T*>(g.dp_bar)[i] = static_cast<T>(partials->dp_total[i]);
    }
  }

  void run_wave(const Wave& wave, char* scratch, size_t stride) const {
    auto walk = [&](int64_t i, int worker) {
      Arena arena(scratch + stride * static_cast<size_t>(worker));
      Scratch x = make_scratch(arena);
      task(wave, wave.r0 + i / groups.count, i % groups.count, x);
    };
    parallel_for(threads, p.pool, (wave.r1 - wave.r0) * groups.count, walk);
    if (M::kSmooths) return;
    auto reduce = [&](int64_t i, int) {
      const int64_t r = wave.r0 + i / 2;
      if (wave.end(row_at(p, r)) <= wave.begin()) return;
      if (i % 2 == 0) partials->reduce_slots(wave, r, partials->dk, g.dk, p.k.dtype);
      if (i % 2 == 1) partials->reduce_slots(wave, r, partials->dq, g.dq, p.q.dtype);
    };
    parallel_for(threads, p.pool, (wave.r1 - wave.r0) * 2, reduce);
  }

  int run() {
    const int64_t gd = p.G * p.D;
    const bool own_gaps = g.ddt && p.dt_channels != p.D;  // summed over channels afterwards
    Arena measure(nullptr), shared(nullptr);
    make_scratch(measure);
    Partials<T>(shared, p, groups, waves);
    const Block scratch(measure.used() * static_cast<size_t>(threads)), block(shared.used());
    const Block channels(own_gaps ? static_cast<size_t>(p.B * p.T * p.D) * sizeof(T) : 0);
    if (!scratch || !block || !channels) return KLA_ERROR_MEMORY;
    Arena arena(block.data());
    Partials<T> sums(arena, p, groups, waves);
    partials = &sums;
    targets = {{g.dv, p.v.dtype},
               {g.dlam_v, M::kSmooths ? p.v.dtype : p.lam_v.dtype},
               {own_gaps ? channels.data() : g.ddt, own_gaps ? p.compute : p.dt.dtype}};
    std::fill(sums.da_total, sums.da_total + gd, 0.0);
    std::fill(sums.dp_total, sums.dp_total + gd, 0.0);
    for (int64_t r0 = 0, r1; r0 < p.R; r0 = r1) {
      r1 = waves.rows_end(r0);
      const int64_t chunks = waves.chunks(r0, r1), slice = waves.slice(r0, r1);
      int64_t c0 = chunks == 0 ? 0 : (chunks - 1) / slice * slice;
      for (; c0 >= 0; c0 -= slice)
        run_wave({r0, r1, c0, std::min(chunks, c0 + slice)}, scratch.data(), measure.used());
      if (!M::kSmooths) reduce_dynamics(r1 - r0);
    }
    if (!M::kSmooths) store_dynamics();
    if (own_gaps) reduce_gaps<T>(p, channels.data(), g.ddt, threads);
    return KLA_OK;
  }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
