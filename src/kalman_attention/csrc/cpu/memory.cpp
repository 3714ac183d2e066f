// The matrix memory of the baselines (gated linear attention, Gated DeltaNet, mLSTM), forward and backward;
// compiled once per instruction set. Per row and head, with the state S [K, V],
//   D_t = diag(alpha_t) S_{t-1},  S_t = D_t + beta_t k_t u_t^T,  y_t = S_t^T q_t,
// where u_t = v_t, or v_t - D_t^T k_t for the delta rule.
//
// Forward, lanes lie along V: nothing is summed over them. Columns of S do not meet, so a block of a few vectors is
// carried over all tokens before the next, and the state in use fits in the first-level cache for heads of any size.
//
// Backward, lanes lie along K, which leaves one sum over lanes, dw. With dS the adjoint of S_t:
//   dS += q dy^T,  dq = S_t dy = alpha * (S_{t-1} dy) + beta k (u . dy),
//   x = dS u,  dw = dS^T k,  dk = beta x,  dbeta = k . x,  dv = du = beta dw,
//   delta rule: dk -= alpha * (S_{t-1} du),  dS -= k du^T,
//   dalpha = rowsum(dS * S_{t-1}),  dS <- diag(alpha) dS.
// States are recomputed from the checkpoints: a chunk once, keeping every eighth state, then eight tokens at a time.
// Dividing a state by its decay instead would lose its digits.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "kernels.h"
#include "parallel.h"
#include "plan.h"
#include "vector.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {
namespace {

constexpr int64_t kStep = 8, kSteps = KLA_CHUNK / kStep;
constexpr int64_t kAhead = 12;  // tokens from prefetch to use

// Vectors that the inner loops keep in registers: eight arrays of them in the backward pass.
constexpr int kMostVectors = KLA_VECTOR_BYTES == 64 ? 4 : 2;

// Bytes of the state in use in the backward pass; several of its kind are read and written.
constexpr int64_t kGroupBytes = 8192;

template <class T>
KLA_INLINE int64_t vectors(int64_t count) { return (count + kLanes<T> - 1) / kLanes<T>; }

// The first `count` lanes, fewer than all. A copy by bytes would be read back before it has been written.
template <class T>
KLA_INLINE Vec<T> load_first(const T* x, int64_t count) {
#if KLA_VECTOR_BYTES == 64 && defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), x);
  else return _mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << count) - 1), x);
#else
  Vec<T> lanes = {};
  for (int i = 0; i < kLanes<T>; ++i)
    if (i < count) lanes[i] = x[i];
  return lanes;
#endif
}

template <class T>
KLA_INLINE void store_first(Vec<T> x, T* to, int64_t count) {
#if KLA_VECTOR_BYTES == 64 && defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), x);
  else _mm512_mask_storeu_pd(to, static_cast<__mmask8>((1u << count) - 1), x);
#else
  for (int i = 0; i < kLanes<T>; ++i)
    if (i < count) to[i] = x[i];
#endif
}

template <class T>
KLA_INLINE Vec<T> load_part(const T* x, int64_t count) {
  return count >= kLanes<T> ? load_any<Vec<T>>(x) : load_first(x, count);
}

template <class T>
KLA_INLINE void store_part(Vec<T> x, T* to, int64_t count) {
  if (count >= kLanes<T>) store_any(to, x);
  else store_first(x, to, count);
}

// Adds the two halves of a segment of S lanes, then those of their sum, until every lane has the sum of all.
template <class T, int S = kLanes<T>>
KLA_INLINE Vec<T> total(Vec<T> x) {
  if constexpr (S == 1) return x;
  else return total<T, S / 2>(fold<T, S>(x, x, std::make_integer_sequence<int, kLanes<T>>{}));
}

// Tokens of one head lie apart, each in a cache line of its own, so the processor does not see the next one coming.
template <int WRITE, class T>
KLA_INLINE void fetch_lines(const T* x, int64_t size) {
  for (int64_t i = 0; i < size; i += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(x + i, WRITE);
}

// The tokens of one row, from an entry of the last axis on.
template <class T>
struct Tokens {
  const T* data;
  int64_t stride;

  Tokens(const T* first, int64_t step) : data(first), stride(step) {}
  Tokens(const kla_array& x, int64_t b, int64_t first)
      : Tokens(x.data == nullptr ? nullptr : static_cast<const T*>(x.data) + b * x.stride_b + first, x.stride_t) {}
  const T* at(int64_t t) const { return data + t * stride; }
  KLA_METHOD void fetch(int64_t t, int64_t size) const { fetch_lines<0>(at(t), size); }
};

// One row and head, from column c0 on.
template <class T>
class Head {
 protected:
  static constexpr int L = kLanes<T>;
  const kla_memory_params& p;
  const int64_t b, h, c0;
  const Tokens<T> q, k, v, alpha, beta;

  Head(const kla_memory_params& params, int64_t task, int64_t first)
      : p(params), b(task / p.H), h(task % p.H), c0(first), q(p.q, b, h * p.K), k(p.k, b, h * p.K),
        v(p.v, b, h * p.V + c0), alpha(p.alpha, b, h * p.decays), beta(p.beta, b, h) {}

  KLA_METHOD T rate(int64_t t) const { return beta.data == nullptr ? T(1) : *beta.at(t); }

  // Where the head's tokens start in a dense array [B, T, H, size], and its matrix in [B, H, K, V].
  int64_t tokens(int64_t size) const { return (b * p.T * p.H + h) * size; }
  int64_t matrix() const { return (b * p.H + h) * p.K * p.V + c0; }

  T* checkpoint(int64_t chunk) const {
    const int64_t chunks = (p.T + KLA_CHUNK - 1) / KLA_CHUNK;
    return static_cast<T*>(p.checkpoints) + ((b * p.H + h) * chunks + chunk) * p.K * p.V + c0;
  }
};

// W vectors of columns, over all tokens.
template <class T, int W, bool DELTA>
class Forward : Head<T> {
 public:
  // The scratch has K rows of W vectors.
  Forward(const kla_memory_params& params, int64_t task, int64_t first, T* scratch)
      : Head<T>(params, task, first), count(std::min<int64_t>(kWidth, p.V - c0)), channel(p.decays == 1 ? 0 : 1),
        state(scratch) {}

  void run() const {
    get(static_cast<const T*>(p.state_0) + this->matrix(), state);
    T* const y = static_cast<T*>(p.y) + this->tokens(p.V) + c0;
    T* const saved = DELTA && p.residual != nullptr ? static_cast<T*>(p.residual) + this->tokens(p.V) + c0 : nullptr;
    Vec<T> r[W] = {};
    if (DELTA && p.T > 0) recall(r);
    for (int64_t t = 0; t < p.T; ++t) {
      if (p.checkpoints != nullptr && t % KLA_CHUNK == 0) put(state, this->checkpoint(t / KLA_CHUNK));
      fetch(std::min(t + kAhead, p.T - 1), y);
      Vec<T> u[W], read[W];
      for (int j = 0; j < W; ++j) {
        u[j] = load_part(v.at(t) + j * L, count - j * L);
        if constexpr (DELTA) u[j] -= r[j];
        if (saved != nullptr) store_part(u[j], saved + t * p.H * p.V + j * L, count - j * L);
      }
      advance(t, u, read, r);
      for (int j = 0; j < W; ++j) store_part(read[j], y + t * p.H * p.V + j * L, count - j * L);
    }
    put(state, static_cast<T*>(p.state) + this->matrix());
  }

 private:
  using Head<T>::L, Head<T>::p, Head<T>::c0, Head<T>::q, Head<T>::k, Head<T>::v, Head<T>::alpha;
  static constexpr int kWidth = W * L;
  const int64_t count;
  const int64_t channel;  // from one key channel to the next in alpha
  T* const state;

  KLA_METHOD void fetch(int64_t t, T* y) const {
    q.fetch(t, p.K);
    k.fetch(t, p.K);
    v.fetch(t, count);
    alpha.fetch(t, p.decays);
    fetch_lines<1>(y + t * p.H * p.V, count);
  }

  // Between a matrix [K, V] and the block [K, W L], whose missing columns are 0.
  void get(const T* from, T* to) const {
    for (int64_t n = 0; n < p.K; ++n)
      for (int j = 0; j < W; ++j) store(to + n * kWidth + j * L, load_part(from + n * p.V + j * L, count - j * L));
  }
  void put(const T* from, T* to) const {
    for (int64_t n = 0; n < p.K; ++n)
      for (int j = 0; j < W; ++j) store_part(load(from + n * kWidth + j * L), to + n * p.V + j * L, count - j * L);
  }

  // r = D^T k of the first token.
  void recall(Vec<T>* r) const {
    for (int64_t n = 0; n < p.K; ++n)
      for (int j = 0; j < W; ++j)
        r[j] += *(k.at(0) + n) * *(alpha.at(0) + n * channel) * load(state + n * kWidth + j * L);
  }

  // The state takes in token t. In the same pass, reads y and, for the delta rule, r of the next token. Even and odd
  // key channels have sums of their own, because an addition has to wait for the one before it.
  KLA_METHOD void advance(int64_t t, const Vec<T>* u, Vec<T>* y, Vec<T>* r) const {
    const int64_t next = std::min(t + 1, p.T - 1);
    const T *qt = q.at(t), *kt = k.at(t), *at = alpha.at(t), *k_next = k.at(next), *a_next = alpha.at(next);
    const T b_t = this->rate(t);
    Vec<T> w[W], y_sum[2][W] = {}, r_sum[2][W] = {};
    for (int j = 0; j < W; ++j) w[j] = b_t * u[j];
    auto row = [&](int64_t n, int odd) KLA_ALWAYS {
      const T a = at[n * channel], key = kt[n], query = qt[n], key_next = DELTA ? k_next[n] * a_next[n * channel] : T(0);
      T* const s = state + n * kWidth;
      for (int j = 0; j < W; ++j) {
        const Vec<T> now = a * load(s + j * L) + key * w[j];
        store(s + j * L, now);
        y_sum[odd][j] += query * now;
        if constexpr (DELTA) r_sum[odd][j] += key_next * now;
      }
    };
    int64_t n = 0;
    for (; n + 1 < p.K; n += 2) {
      row(n, 0);
      row(n + 1, 1);
    }
    if (n < p.K) row(n, 0);
    for (int j = 0; j < W; ++j) {
      y[j] = y_sum[0][j] + y_sum[1][j];
      if constexpr (DELTA) r[j] = r_sum[0][j] + r_sum[1][j];
    }
  }
};

// The working arrays of one thread in the backward pass. A state [K, columns] is stored as blocks of up to
// kMostVectors vectors of key channels: [blocks, columns, vectors].
template <class T>
struct Scratch {
  T *state, *adjoint;
  T* starts;          // [kSteps]: states before every kStep tokens of a chunk
  T* before;          // [kStep]: states before every token of a step
  T *products, *dw;   // [columns, L] and [columns]: the terms of dw, and their sums
  T *du, *zeros;      // [columns]

  Scratch(Arena& arena, int64_t K, int64_t columns) {
    const int64_t size = vectors<T>(K) * kLanes<T> * columns, whole = vectors<T>(columns) * kLanes<T>;
    state = arena.take<T>(size);
    adjoint = arena.take<T>(size);
    starts = arena.take<T>(kSteps * size);
    before = arena.take<T>(kStep * size);
    products = arena.take<T>(whole * kLanes<T>);
    dw = arena.take<T>(whole);
    du = arena.take<T>(whole);
    zeros = arena.take<T>(whole);
  }
};

// A group of columns, over all tokens.
template <class T, bool DELTA, bool CHANNELS>
class Backward : Head<T> {
 public:
  Backward(const kla_memory_params& params, const kla_memory_grads& grads, int64_t task, int64_t first, int64_t columns,
           const Scratch<T>& scratch)
      : Head<T>(params, task, first), g(grads), count(columns), size(vectors<T>(p.K) * L * columns), m(scratch),
        u(DELTA ? Tokens<T>(static_cast<const T*>(p.residual) + this->tokens(p.V) + c0, p.H * p.V) : v),
        dy(g.dy.data == nullptr ? Tokens<T>(scratch.zeros, 0) : Tokens<T>(g.dy, b, h * p.V + c0)) {}

  void run() const {
    std::fill(m.zeros, m.zeros + count, T(0));
    std::fill(m.adjoint, m.adjoint + size, T(0));
    if (g.dstate != nullptr) get(static_cast<const T*>(g.dstate) + this->matrix(), m.adjoint);
    if (p.T > 0) enter(p.T - 1);
    for (int64_t chunk = (p.T + KLA_CHUNK - 1) / KLA_CHUNK - 1; chunk >= 0; --chunk) {
      const int64_t t0 = chunk * KLA_CHUNK, t1 = std::min(p.T, t0 + KLA_CHUNK), steps = (t1 - t0 + kStep - 1) / kStep;
      std::fill(m.starts, m.starts + size, T(0));
      get(this->checkpoint(chunk), m.starts);
      for (int64_t step = 1; step < steps; ++step) replay(t0 + (step - 1) * kStep, m.starts + (step - 1) * size);
      for (int64_t step = steps - 1; step >= 0; --step) {
        const int64_t first = t0 + step * kStep, last = std::min(t1, first + kStep);
        std::copy(m.starts + step * size, m.starts + (step + 1) * size, m.before);
        for (int64_t i = 0; first + i + 1 < last; ++i) take(first + i, m.before + i * size, m.before + (i + 1) * size);
        for (int64_t t = last - 1; t >= first; --t) walk(t, m.before + (t - first) * size);
      }
    }
    put(m.adjoint, static_cast<T*>(g.dstate_0) + this->matrix());
  }

 private:
  using Head<T>::L, Head<T>::p, Head<T>::b, Head<T>::h, Head<T>::c0, Head<T>::q, Head<T>::k, Head<T>::v,
      Head<T>::alpha;
  const kla_memory_grads& g;
  const int64_t count;  // columns
  const int64_t size;   // of a state
  const Scratch<T>& m;
  const Tokens<T> u, dy;

  // Calls f(W, n) for the key channels from n on, W vectors of them.
  template <class F>
  KLA_METHOD void for_blocks(F f) const {
    int64_t n = 0, left = vectors<T>(p.K);
    if constexpr (kMostVectors == 4)
      for (; left >= 4; left -= 4, n += 4 * L) f(std::integral_constant<int, 4>{}, n);
    for (; left >= 2; left -= 2, n += 2 * L) f(std::integral_constant<int, 2>{}, n);
    if (left > 0) f(std::integral_constant<int, 1>{}, n);
  }

  // f(entry of a matrix [K, V], entry of a state).
  template <class F>
  void for_entries(F f) const {
    for_blocks([&](auto width, int64_t n0) {
      const int64_t rows = std::min<int64_t>(width * L, p.K - n0);
      for (int64_t c = 0; c < count; ++c)
        for (int64_t n = 0; n < rows; ++n) f((n0 + n) * p.V + c, (n0 * count) + c * width * L + n);
    });
  }
  void get(const T* from, T* to) const { for_entries([=](int64_t i, int64_t j) { to[j] = from[i]; }); }
  void put(const T* from, T* to) const { for_entries([=](int64_t i, int64_t j) { to[i] = from[j]; }); }

  // Key channels from n on, and decays of them; those beyond K are 0.
  template <int W>
  KLA_METHOD void load_keys(const T* x, int64_t n, Vec<T>* to) const {
    for (int j = 0; j < W; ++j) to[j] = load_part(x + n + j * L, p.K - n - j * L);
  }
  template <int W>
  KLA_METHOD void load_decays(int64_t t, int64_t n, Vec<T>* to) const {
    if constexpr (CHANNELS) load_keys<W>(alpha.at(t), n, to);
    else std::fill(to, to + W, splat(*alpha.at(t)));
  }

  // S_t from S_{t-1}.
  KLA_METHOD void take(int64_t t, const T* from, T* to) const {
    const T* const u_t = u.at(t);
    const T b_t = this->rate(t);
    for_blocks([&](auto width, int64_t n0) KLA_ALWAYS {
      constexpr int W = width;
      Vec<T> key[W], a[W];
      load_keys<W>(k.at(t), n0, key);
      load_decays<W>(t, n0, a);
      for (int j = 0; j < W; ++j) key[j] *= b_t;
      const T* s = from + n0 * count;
      T* s_new = to + n0 * count;
      for (int64_t c = 0; c < count; ++c, s += W * L, s_new += W * L)
        for (int j = 0; j < W; ++j) store(s_new + j * L, a[j] * load(s + j * L) + u_t[c] * key[j]);
    });
  }

  // The state after a whole step, behind the one before it.
  void replay(int64_t first, T* from) const {
    for (int64_t i = 0; i < kStep; ++i) {
      const int64_t t = std::min(first + kStep + i, p.T - 1);
      k.fetch(t, p.K);
      u.fetch(t, count);
      alpha.fetch(t, p.decays);
    }
    take(first, from, m.state);
    for (int64_t i = 1; i + 1 < kStep; ++i) take(first + i, m.state, m.state);
    take(first + kStep - 1, m.state, from + size);
  }

  // The last token's share of the adjoint, dS += q dy^T, and its dw.
  void enter(int64_t t) const {
    const T* const dy_t = dy.at(t);
    for_blocks([&](auto width, int64_t n0) {
      constexpr int W = width;
      Vec<T> query[W], key[W];
      load_keys<W>(q.at(t), n0, query);
      load_keys<W>(k.at(t), n0, key);
      T* d = m.adjoint + n0 * count;
      for (int64_t c = 0; c < count; ++c, d += W * L) {
        Vec<T> product = {};
        for (int j = 0; j < W; ++j) {
          const Vec<T> ds = load(d + j * L) + dy_t[c] * query[j];
          store(d + j * L, ds);
          product += key[j] * ds;
        }
        add_product(n0, c, product);
      }
    });
    sum_products();
  }

  KLA_METHOD void add_product(int64_t n0, int64_t c, Vec<T> product) const {
    T* const at = m.products + c * L;
    store(at, n0 == 0 ? product : load(at) + product);
  }

  void sum_products() const {
    // A single column on its own: mLSTM has one more than a power of two.
    const int64_t odd = count % L == 1 ? 1 : 0;
    row_sums(m.products, count - odd, m.dw);
    // As a whole vector, because it is read as one: a single number would have to reach the cache first.
    if (odd) store(m.dw + count - 1, total<T>(load(m.products + (count - 1) * L)));
  }

  // Gradients of token t, given the state before it. The adjoint has its share already; in the same pass it takes in
  // that of the token before.
  KLA_METHOD void walk(int64_t t, const T* states) const {
    const int64_t prev = std::max<int64_t>(t - 1, 0);
    const T *u_t = u.at(t), *dy_t = dy.at(t), *dy_prev = t > 0 ? dy.at(prev) : m.zeros;
    const T b_t = this->rate(t);
    T* const dv = static_cast<T*>(g.dv) + this->tokens(p.V) + t * p.H * p.V + c0;
    Vec<T> along = {}, dbeta = {}, dalpha = {};
    for (int64_t c = 0; c < count; c += L) {
      const Vec<T> du = b_t * load(m.dw + c);
      store_part(du, dv + c, count - c);
      if constexpr (DELTA) store(m.du + c, du);
      along += load_part(u_t + c, count - c) * load_part(dy_t + c, count - c);
    }
    fetch(std::max<int64_t>(t - kAhead, 0));
    const T read = b_t * total<T>(along)[0];
    const int64_t at_keys = this->tokens(p.K) + t * p.H * p.K;
    for_blocks([&](auto width, int64_t n0) KLA_ALWAYS {
      constexpr int W = width;
      Vec<T> a[W], key[W], key_prev[W], query_prev[W], s_dy[W] = {}, s_du[W] = {}, x[W] = {}, da[W] = {};
      load_decays<W>(t, n0, a);
      load_keys<W>(k.at(t), n0, key);
      load_keys<W>(k.at(prev), n0, key_prev);
      load_keys<W>(q.at(prev), n0, query_prev);
      const T* s = states + n0 * count;
      T* d = m.adjoint + n0 * count;
      for (int64_t c = 0; c < count; ++c, s += W * L, d += W * L) {
        Vec<T> product = {};
        for (int j = 0; j < W; ++j) {
          const Vec<T> old = load(s + j * L);
          Vec<T> ds = load(d + j * L);
          s_dy[j] += dy_t[c] * old;
          x[j] += u_t[c] * ds;
          if constexpr (DELTA) {
            s_du[j] += m.du[c] * old;
            ds -= m.du[c] * key[j];
          }
          da[j] += ds * old;
          ds = a[j] * ds + dy_prev[c] * query_prev[j];
          store(d + j * L, ds);
          product += key_prev[j] * ds;
        }
        add_product(n0, c, product);
      }
      for (int j = 0; j < W; ++j) {
        const int64_t n = n0 + j * L, left = p.K - n;
        dbeta += key[j] * x[j];
        give(a[j] * s_dy[j] + read * key[j], static_cast<T*>(g.dq) + at_keys + n, left);
        Vec<T> dk = b_t * x[j];
        if constexpr (DELTA) dk -= a[j] * s_du[j];
        give(dk, static_cast<T*>(g.dk) + at_keys + n, left);
        if constexpr (CHANNELS) give(da[j], static_cast<T*>(g.dalpha) + at_keys + n, left);
        else dalpha += da[j];
      }
    });
    const int64_t at = this->tokens(1) + t * p.H;
    if (g.dbeta != nullptr) give(total<T>(dbeta)[0], static_cast<T*>(g.dbeta) + at);
    if constexpr (!CHANNELS) give(total<T>(dalpha)[0], static_cast<T*>(g.dalpha) + at);
    sum_products();
  }

  // What walk reads and writes besides the inputs of replay.
  KLA_METHOD void fetch(int64_t t) const {
    const int64_t at_keys = this->tokens(p.K) + t * p.H * p.K;
    q.fetch(t, p.K);
    dy.fetch(t, count);
    fetch_lines<1>(static_cast<T*>(g.dq) + at_keys, p.K);
    fetch_lines<1>(static_cast<T*>(g.dk) + at_keys, p.K);
    if constexpr (CHANNELS) fetch_lines<1>(static_cast<T*>(g.dalpha) + at_keys, p.K);
    fetch_lines<1>(static_cast<T*>(g.dv) + this->tokens(p.V) + t * p.H * p.V + c0, count);
  }

  // To the output. The first group of columns writes, the others add to it.
  KLA_METHOD void give(Vec<T> x, T* to, int64_t left) const {
    store_part(c0 == 0 ? x : load_part(to, left) + x, to, left);
  }
  KLA_METHOD void give(T x, T* to) const { *to = c0 == 0 ? x : *to + x; }
};

template <class T, int W>
void run_forward(const kla_memory_params& p, int64_t task, int64_t c0, T* scratch) {
  if (p.delta) Forward<T, W, true>(p, task, c0, scratch).run();
  else Forward<T, W, false>(p, task, c0, scratch).run();
}

// All columns of a head, widest blocks first.
template <class T>
void run_head(const kla_memory_params& p, int64_t task, T* scratch) {
  int64_t c0 = 0;
  const auto left = [&] { return vectors<T>(p.V - c0); };
  if constexpr (kMostVectors == 4)
    for (; left() >= 4; c0 += 4 * kLanes<T>) run_forward<T, 4>(p, task, c0, scratch);
  for (; left() >= 2; c0 += 2 * kLanes<T>) run_forward<T, 2>(p, task, c0, scratch);
  if (left() > 0) run_forward<T, 1>(p, task, c0, scratch);
}

template <class T, bool DELTA>
void run_group(const kla_memory_params& p, const kla_memory_grads& g, int64_t task, int64_t c0, int64_t columns,
               const Scratch<T>& m) {
  if (p.decays == 1) Backward<T, DELTA, false>(p, g, task, c0, columns, m).run();
  else Backward<T, DELTA, true>(p, g, task, c0, columns, m).run();
}

// Runs f(task, scratch of its thread) for every head of every row; sums over a head stay inside its task.
template <class F>
int for_heads(const kla_memory_params& p, size_t bytes, F f) {
  const double useful = static_cast<double>(p.B) * p.T * p.H * p.K * p.V / kMinUpdatesPerThread;
  const int64_t threads = std::max<int64_t>(1, static_cast<int64_t>(std::min<double>(p.threads, useful)));
  Block block(bytes * static_cast<size_t>(threads));
  if (!block) return KLA_ERROR_MEMORY;
  auto run = [&](int64_t task, int worker) { f(task, block.data() + static_cast<size_t>(worker) * bytes); };
  parallel_for(threads, KLA_POOL_AUTO, p.B * p.H, run);
  return KLA_OK;
}

template <class T>
int forward(const kla_memory_params& p) {
  const size_t bytes = static_cast<size_t>(p.K) * kMostVectors * KLA_VECTOR_BYTES;
  return for_heads(p, bytes, [&](int64_t task, char* at) { run_head(p, task, reinterpret_cast<T*>(at)); });
}

template <class T>
int backward(const kla_memory_params& p, const kla_memory_grads& g) {
  // Groups of about the same size, which depends on the shape alone.
  const int64_t column = vectors<T>(p.K) * KLA_VECTOR_BYTES, most = std::max<int64_t>(16, kGroupBytes / column);
  const int64_t groups = (p.V + most - 1) / most, columns = (p.V + groups - 1) / groups;
  Arena measure(nullptr);
  Scratch<T>(measure, p.K, columns);
  return for_heads(p, measure.used(), [&](int64_t task, char* at) {
    Arena arena(at);
    const Scratch<T> m(arena, p.K, columns);
    for (int64_t c0 = 0; c0 < p.V; c0 += columns) {
      const int64_t count = std::min(columns, p.V - c0);
      p.delta ? run_group<T, true>(p, g, task, c0, count, m) : run_group<T, false>(p, g, task, c0, count, m);
    }
  });
}

}  // namespace

int memory_forward(const kla_memory_params& p) {
  return p.dtype == KLA_FLOAT64 ? forward<double>(p) : forward<float>(p);
}

int memory_backward(const kla_memory_params& p, const kla_memory_grads& g) {
  return p.dtype == KLA_FLOAT64 ? backward<double>(p, g) : backward<float>(p, g);
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
