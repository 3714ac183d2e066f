// Gradients of smoothing. A task takes one row and one vector of channels and goes through all of its tokens four
// times: forwards for the beliefs of the filter, backwards for what later tokens say (J, eta), forwards with the
// adjoint of the latter, backwards with the adjoint of the filter. The whole path is kept: T (3 G + 2 N) vectors per
// thread.
//
// The smoothed belief at a token is V = s c and M = (mu + s eta) c with c = 1 / (1 + J s) (filtering/smoothing.py), so
// with dM = q dy and dV = |q|^2 dy_var
//
//   dmu = c dM,   ds = c (eta - J M) dM + c^2 dV,   deta = V dM,   dJ = -V M dM - V^2 dV,
//
// where the sums over the slots of a block are left out. J' = J + phi and eta' = eta + b became J = a (a w) J' and
// eta = (a w) eta' one token earlier, with w = 1 / (1 + p J'), so the adjoints of those are
//
//   deta' = a w deta,             dJ' = a w (a w dJ - p w eta' deta),
//   da = 2 (a w) J' dJ + w eta' deta,   dp = -(a w) J' (a w J' dJ + w eta' deta).
#ifndef KLA_CPU_SMOOTH_BACKWARD_H
#define KLA_CPU_SMOOTH_BACKWARD_H

#include <vector>

#include "backward.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

template <bool GAPS, class T>
class SmoothBackward {
 public:
  SmoothBackward(const Scan& params, const kla_scan_grads& grads)
      : p(params),
        g(grads),
        threads(useful_threads(params)),
        m(params.N / params.G),
        tiles((params.D + L - 1) / L),
        longest(longest_row(params)),
        budget(std::max<int64_t>(longest, kPartials / (tiles * params.N))) {}

  int run() {
    const bool own_gaps = g.ddt && p.dt_channels != p.D;  // summed over channels afterwards
    const Block channels(own_gaps ? static_cast<size_t>(p.B * p.T * p.D) * sizeof(T) : 0);
    Arena measure(nullptr), sums(nullptr);
    make_scratch(measure);
    take_partials(sums);
    const Block scratch(measure.used() * static_cast<size_t>(threads)), block(sums.used());
    if (!channels || !scratch || !block) return KLA_ERROR_MEMORY;
    Arena arena(block.data());
    take_partials(arena);
    targets = {{g.dv, p.v.dtype},
               {g.dlam_v, p.lam_v.dtype},
               {own_gaps ? channels.data() : g.ddt, own_gaps ? p.compute : p.dt.dtype}};
    std::vector<Scratch> workers;
    for (int64_t i = 0; i < threads; ++i) {
      Arena part(scratch.data() + measure.used() * static_cast<size_t>(i));
      workers.push_back(make_scratch(part));
    }
    std::fill(dynamics_total, dynamics_total + 2 * p.G * p.D, 0.0);
    for (int64_t r0 = 0, r1; r0 < p.R; r0 = r1) {
      r1 = rows_end(r0);
      run_rows(r0, r1, workers);
    }
    for (int64_t i = 0; i < p.G * p.D; ++i) {
      static_cast<T*>(g.da_bar)[i] = static_cast<T>(dynamics_total[i]);
      static_cast<T*>(g.dp_bar)[i] = static_cast<T>(dynamics_total[p.G * p.D + i]);
    }
    if (own_gaps) reduce_gaps<T>(p, channels.data(), g.ddt, threads);
    return KLA_OK;
  }

 private:
  using V = Vec<T>;
  static constexpr int L = kLanes<T>;
  enum { kPathS, kPathJ, kPathR, kPathBlock };  // of a block: after a token, and r of the token
  enum { kPathMu, kPathEta, kPathSlot };

  // The tokens of a chunk, and how many come before it.
  struct Piece {
    Stage<T> in;
    ChannelCopies<T> copies;
    ChannelRows<T> rows;
    int64_t before;
  };

  struct Scratch {
    Tiles<T, 1> state;
    std::vector<Piece> pieces;
    T *path, *dk, *dq, *sums;
  };

  // What a token is for one vector of channels.
  struct Token {
    V v, lam_v, lv, dt;
    const T *k, *q, *k2, *q2;

    Token(const Piece& x, int64_t j)
        : lam_v(load_any<V>(x.rows.lam_v.at(j, 0))),
          dt(GAPS ? load_any<V>(x.rows.dt.at(j, 0)) : V{}),
          k(x.in.k + j * x.in.N),
          q(x.in.q + j * x.in.N),
          k2(x.in.k2 + j * x.in.G),
          q2(x.in.q2 + j * x.in.G) {
      v = seen<V>(load_any<V>(x.rows.v.at(j, 0)), lam_v);
      lv = lam_v * v;
    }
  };

  const Scan& p;
  const kla_scan_grads& g;
  const int64_t threads, m, tiles;
  const int64_t longest, budget;  // tokens of the longest row, and of the rows that are taken together
  Targets targets{};
  T *dk_partial = nullptr, *dq_partial = nullptr;  // [tiles, tokens of the rows at hand, N]
  double *dynamics_rows = nullptr, *dynamics_total = nullptr;  // da and dp: [rows at hand, 2, G, D], [2, G, D]

  // Rows are taken together until their partial sums fill L3; many short ones occupy many threads.
  static constexpr int64_t kPartials = 1 << 20, kRows = 128;
  static int64_t longest_row(const Scan& p) {
    int64_t most = 0;
    for (int64_t r = 0; r < p.R; ++r) most = std::max(most, row_at(p, r).length);
    return most;
  }
  int64_t rows_end(int64_t r0) const {
    int64_t r1 = r0 + 1, tokens = row_at(p, r0).length;
    for (; r1 < std::min(p.R, r0 + kRows); ++r1) {
      tokens += row_at(p, r1).length;
      if (tokens > budget) break;
    }
    return r1;
  }

  void take_partials(Arena& arena) {
    for (T** x : {&dk_partial, &dq_partial}) *x = arena.take<T>(tiles * budget * p.N);
    dynamics_rows = arena.take<double>(std::min(p.R, kRows) * 2 * p.G * p.D);
    dynamics_total = arena.take<double>(2 * p.G * p.D);
  }

  Scratch make_scratch(Arena& arena) const {
    Scratch x{Tiles<T, 1>(arena, p, kBackwardBlock, kBackwardSlot, L), {}, nullptr, nullptr, nullptr, nullptr};
    const int64_t tokens = std::min<int64_t>(p.T, KLA_CHUNK);
    for (int64_t c = 0; c * KLA_CHUNK < longest; ++c)
      x.pieces.push_back({Stage<T>(arena, L, p), ChannelCopies<T>(arena, p, tokens, L), {}, 0});
    x.path = arena.take<T>((longest + 1) * p.G * fields());
    for (T** sum : {&x.dk, &x.dq}) *sum = arena.take<T>((tokens * p.N + L) * L);
    x.sums = arena.take<T>(tokens * p.N + L);
    return x;
  }

  int64_t fields() const { return (kPathBlock + m * kPathSlot) * L; }  // of a block in the path
  T* path_at(const Scratch& x, int64_t t, int64_t block) const { return x.path + (t * p.G + block) * fields(); }
  T* slots_of(T* block) const { return block + kPathBlock * L; }
  static auto step_to(const T* lane, const Token& token) { return dynamics<GAPS, T, L>(lane, token.dt); }

  void run_rows(int64_t r0, int64_t r1, std::vector<Scratch>& workers) const {
    const int64_t gd = p.G * p.D, first = row_at(p, r0).t0;
    const auto offset = [&](int64_t r) {
      return (p.cu_seqlens ? row_at(p, r).t0 - first : (r - r0) * p.T) * p.N;
    };
    std::fill(dynamics_rows, dynamics_rows + (r1 - r0) * 2 * gd, 0.0);
    auto walk = [&](int64_t i, int worker) {
      const int64_t r = r0 + i / tiles, tile = i % tiles;
      task(r, tile, tile * budget * p.N + offset(r), dynamics_rows + (r - r0) * 2 * gd,
           workers[static_cast<size_t>(worker)]);
    };
    parallel_for(threads, p.pool, (r1 - r0) * tiles, walk);
    auto reduce = [&](int64_t i, int) {
      const int64_t r = r0 + i / 2;
      if (i % 2 == 0) reduce_slots(row_at(p, r), dk_partial + offset(r), g.dk, p.k.dtype);
      else reduce_slots(row_at(p, r), dq_partial + offset(r), g.dq, p.q.dtype);
    };
    parallel_for(threads, p.pool, (r1 - r0) * 2, reduce);
    for (int64_t r = 0; r < r1 - r0; ++r)
      for (int64_t i = 0; i < 2 * gd; ++i) dynamics_total[i] += dynamics_rows[r * 2 * gd + i];
  }

  void reduce_slots(const Row& row, const T* partial, void* out, int64_t dtype) const {
    with_type(out, dtype, [&](auto* data) {
      auto* to = data + (row.b * p.T + row.t0) * p.N;
      for (int64_t i = 0; i < row.length * p.N; ++i) {
        T sum = 0;
        for (int64_t tile = 0; tile < tiles; ++tile) sum += partial[tile * budget * p.N + i];
        encode(sum, to + i);
      }
    });
  }

  void task(int64_t r, int64_t tile, int64_t partial, double* da, Scratch& x) const {
    const Row row = row_at(p, r);
    const int64_t d0 = tile * L, size = std::min<int64_t>(L, p.D - d0), chunks = row.chunks();
    double* dp = da + p.G * p.D;
    const auto read = [&](auto field, const void* src, int64_t at) { x.state.load(field, src, at, p.D, d0, size); };
    const auto flush = [&] {
      x.state.add_to(kDa, da, p.D, d0, size);
      x.state.add_to(kDp, dp, p.D, d0, size);
      for (const auto field : {kDa, kDp}) x.state.fill(field, T(0), size);
    };
    read(kA, p.a_bar, 0);
    read(kP, p.p_bar, 0);
    read(kMu, p.mean_0, r);
    read(kS, p.variance_0, r);
    int64_t before = 0;
    for (int64_t c = 0; c < chunks; ++c) {
      Piece& piece = x.pieces[static_cast<size_t>(c)];
      piece.in.begin_chunk(p, row, c, size);
      piece.rows = piece.copies.rows(p, g, targets, piece.in, row, d0, L);
      piece.before = before;
      before += piece.in.count;
    }
    filter(chunks, x);
    look_back(chunks, before, x);
    for (const auto field : {kDs, kDa, kDp}) x.state.fill(field, T(0), size);
    x.state.fill(kDmu, T(0), size);
    for (int64_t c = 0; c < chunks; ++c) {
      const Piece& piece = x.pieces[static_cast<size_t>(c)];
      for (int64_t j = 0; j < piece.in.count; ++j) future_adjoint(piece, j, x);
      const int64_t at = partial + c * KLA_CHUNK * p.N;
      store_slot_sums<false>(piece.in, x.dk, x, dk_partial + at);
      store_slot_sums<false>(piece.in, x.dq, x, dq_partial + at);
      flush();
    }
    read(kDmu, g.dmean, r);
    read(kDs, g.dvariance, r);
    for (int64_t c = chunks - 1; c >= 0; --c) {
      const Piece& piece = x.pieces[static_cast<size_t>(c)];
      for (int64_t j = piece.in.count - 1; j >= 0; --j) filter_adjoint(piece, j, x);
      store_slot_sums<true>(piece.in, x.dk, x, dk_partial + partial + c * KLA_CHUNK * p.N);
      piece.copies.store(p, targets, piece.in, row, d0, piece.rows);
      flush();
    }
    x.state.store(kDmu, g.dmean_0, r, p.D, d0, size);
    x.state.store(kDs, g.dvariance_0, r, p.D, d0, size);
  }

  void filter(int64_t chunks, Scratch& x) const {
    for (int64_t b = 0; b < p.G; ++b) {
      T* first = path_at(x, 0, b);
      store(first + kPathS * L, load(x.state.at(0, b, kS)));
      for (int64_t n = 0; n < m; ++n)
        store(slots_of(first) + (n * kPathSlot + kPathMu) * L, load(x.state.at(0, b * m + n, kMu)));
    }
    for (int64_t c = 0; c < chunks; ++c) {
      const Piece& piece = x.pieces[static_cast<size_t>(c)];
      for (int64_t j = 0; j < piece.in.count; ++j) {
        const Token token(piece, j);
        for (int64_t b = 0; b < p.G; ++b) {
          T *now = path_at(x, piece.before + j, b), *after = path_at(x, piece.before + j + 1, b);
          const auto next = filter_block<V>(step_to(x.state.block(0, b), token), token.k2[b] * token.lam_v, token.lv,
                                            load(now + kPathS * L));
          store(after + kPathS * L, next.s);
          store(after + kPathR * L, next.r);
          for (int64_t n = 0; n < m; ++n) {
            const int64_t at = (n * kPathSlot + kPathMu) * L;
            store(slots_of(after) + at, next.keep * load(slots_of(now) + at) + token.k[b * m + n] * next.gain);
          }
        }
      }
    }
  }

  void look_back(int64_t chunks, int64_t last, Scratch& x) const {
    for (int64_t b = 0; b < p.G; ++b) {
      T* end = path_at(x, last, b);
      store(end + kPathJ * L, V{});
      for (int64_t n = 0; n < m; ++n) store(slots_of(end) + (n * kPathSlot + kPathEta) * L, V{});
    }
    for (int64_t c = chunks - 1; c >= 0; --c) {
      const Piece& piece = x.pieces[static_cast<size_t>(c)];
      for (int64_t j = piece.in.count - 1; j >= 0; --j) {
        const Token token(piece, j);
        for (int64_t b = 0; b < p.G; ++b) {
          T *before = path_at(x, piece.before + j, b), *now = path_at(x, piece.before + j + 1, b);
          const auto to = step_to(x.state.block(0, b), token);
          const V J = load(now + kPathJ * L) + token.k2[b] * token.lam_v;
          const V back = to.a * (1 / (1 + to.noise() * J));
          store(before + kPathJ * L, to.a * (J * back));
          for (int64_t n = 0; n < m; ++n) {
            const int64_t at = (n * kPathSlot + kPathEta) * L;
            store(slots_of(before) + at, (load(slots_of(now) + at) + token.k[b * m + n] * token.lv) * back);
          }
        }
      }
    }
  }

  // Adds what a token contributes to the sums for the dynamics of a block and returns its part of ddt.
  static V add_dynamics(T* lane, const Token& token, V a, V da, V dp) {
    if constexpr (GAPS) {
      return add_gap<T, L>(lane, decay<T>(load(lane + kA * L) * token.dt), a, a * da, dp);
    } else {
      store(lane + kDa * L, load(lane + kDa * L) + da);
      store(lane + kDp * L, load(lane + kDp * L) + dp);
      return V{};
    }
  }

  // kDs and kDmu hold the adjoints of J and eta before the token, and then those after it.
  void future_adjoint(const Piece& piece, int64_t j, Scratch& x) const {
    const Token token(piece, j);
    const V dy = load_any<V>(piece.rows.dy.at(j, 0)), dy_var = load_any<V>(piece.rows.dy_var.at(j, 0));
    V dlv{}, dphi_k2{}, ddt{};
    for (int64_t b = 0; b < p.G; ++b) {
      T *lane = x.state.block(0, b), *dslot = lane + kBackwardBlock * L, *now = path_at(x, piece.before + j + 1, b);
      const auto to = step_to(lane, token);
      const V s = load(now + kPathS * L), J = load(now + kPathJ * L), dJ = load(lane + kDs * L), p_bar = to.noise();
      const V J_seen = J + token.k2[b] * token.lam_v, w = 1 / (1 + p_bar * J_seen), aw = to.a * w;
      const V c = 1 / (1 + J * s), variance = s * c;
      V eta_deta{}, mean_dmean{};
      for (int64_t n = 0; n < m; ++n) {
        const int64_t slot = b * m + n;
        const T* at = slots_of(now) + n * kPathSlot * L;
        const V eta = load(at + kPathEta * L), mean = (load(at + kPathMu * L) + s * eta) * c;
        T* deta = dslot + (n * kBackwardSlot + kDmu) * L;
        const V after = load(deta), deta_seen = aw * after, dmean = token.q[slot] * dy;
        eta_deta += (eta + token.k[slot] * token.lv) * after;
        mean_dmean += mean * dmean;
        dlv += token.k[slot] * deta_seen;
        store(deta, deta_seen + variance * dmean);
        store(x.dk + (j * p.N + slot) * L, token.lv * deta_seen);
        store(x.dq + (j * p.N + slot) * L, dy * mean + (2 * token.q[slot]) * (variance * dy_var));
      }
      const V dJ_seen = aw * (aw * dJ - p_bar * (w * eta_deta)), moved = aw * (J_seen * dJ);
      ddt += add_dynamics(lane, token, to.a, moved + moved + w * eta_deta, -(J_seen * (aw * (moved + w * eta_deta))));
      store(lane + kDs * L, dJ_seen - variance * (mean_dmean + variance * (token.q2[b] * dy_var)));
      dphi_k2 += token.k2[b] * dJ_seen;
      const V lam_dphi = token.lam_v * dJ_seen;
      for (int64_t slot = b * m; slot < (b + 1) * m; ++slot) {
        T* dk = x.dk + (j * p.N + slot) * L;
        store(dk, load(dk) + (2 * token.k[slot]) * lam_dphi);
      }
    }
    store_any(piece.rows.dv.at(j, 0), token.lam_v * dlv);
    store_any(piece.rows.dlam_v.at(j, 0), dphi_k2 + token.v * dlv);
    if (GAPS) store_any(piece.rows.ddt.at(j, 0), ddt);
  }

  // kDs and kDmu hold the adjoints of the belief after the token, and then those before it.
  void filter_adjoint(const Piece& piece, int64_t j, Scratch& x) const {
    const Token token(piece, j);
    const V dy = load_any<V>(piece.rows.dy.at(j, 0)), dy_var = load_any<V>(piece.rows.dy_var.at(j, 0));
    V dv{}, dlam_v{}, ddt{};
    for (int64_t b = 0; b < p.G; ++b) {
      T *lane = x.state.block(0, b), *dslot = lane + kBackwardBlock * L;
      T *before = path_at(x, piece.before + j, b), *now = path_at(x, piece.before + j + 1, b);
      const V s = load(before + kPathS * L), s_new = load(now + kPathS * L), r = load(now + kPathR * L);
      const V J = load(now + kPathJ * L), c = 1 / (1 + J * s_new), a = step_to(lane, token).a;
      const V keep = a * r, gain = s_new * token.lv;
      const T k2 = token.k2[b];
      V k_dmu{}, mu_dmu{}, ds = load(lane + kDs * L) + c * (c * (token.q2[b] * dy_var));
      for (int64_t n = 0; n < m; ++n) {
        const int64_t slot = b * m + n;
        const T *at = slots_of(now) + n * kPathSlot * L, *from = slots_of(before) + n * kPathSlot * L;
        const V eta = load(at + kPathEta * L), mean = (load(at + kPathMu * L) + s_new * eta) * c;
        T* dmean = dslot + (n * kBackwardSlot + kDmu) * L;
        const V local = c * (token.q[slot] * dy), dmu = load(dmean) + local;
        ds += (eta - J * mean) * local;
        k_dmu += token.k[slot] * dmu;
        mu_dmu += load(from + kPathMu * L) * dmu;
        store(dmean, keep * dmu);
        store(x.dk + (j * p.N + slot) * L, gain * dmu);
      }
      const V rest_dmu = r * (token.v * k_dmu - k2 * (a * mu_dmu)), new_dmu = keep * mu_dmu + gain * k_dmu;
      const auto grad = block_adjoint<V>(splat(k2), token.lam_v, s_new, r, rest_dmu, new_dmu, ds);
      const V a_dP = a * grad.dP;
      ddt += add_dynamics(lane, token, a, r * mu_dmu + s * (a_dP + a_dP), grad.dP);
      store(lane + kDs * L, a * a_dP);
      dv += s_new * k_dmu;
      dlam_v += grad.dlam_v;
      const V lam_dphi = token.lam_v * grad.dphi;
      for (int64_t slot = b * m; slot < (b + 1) * m; ++slot) {
        T* dk = x.dk + (j * p.N + slot) * L;
        store(dk, load(dk) + (2 * token.k[slot]) * lam_dphi);
      }
    }
    add_row(piece.rows.dv.at(j, 0), token.lam_v * dv);
    add_row(piece.rows.dlam_v.at(j, 0), dlam_v);
    if (GAPS) add_row(piece.rows.ddt.at(j, 0), ddt);
  }

  static void add_row(T* row, V x) { store_any(row, load_any<V>(row) + x); }

  // Adds up the lanes of the slot sums of a chunk, and stores them by its tokens or adds them to what is there.
  template <bool ADD>
  void store_slot_sums(const Stage<T>& in, const T* vectors, Scratch& x, T* out) const {
    row_sums(vectors, in.count * p.N, x.sums);
    for (int64_t t = 0, j = 0; t < in.tokens; ++t) {
      const bool live = j < in.count && in.live[j] == t;
      for (int64_t n = 0; n < p.N; ++n) {
        const T sum = live ? x.sums[j * p.N + n] : T(0);
        out[t * p.N + n] = ADD ? out[t * p.N + n] + sum : sum;
      }
      j += live;
    }
  }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
