// The matrix memory of the baselines (gated linear attention, Gated DeltaNet, mLSTM), forward and backward;
// compiled once per instruction set. Per row and head, with the state S [K, V],
//   D_t = diag(alpha_t) S_{t-1},  w_t = beta_t u_t,  S_t = D_t + k_t w_t^T,  y_t = S_t^T q_t,
// where u_t = v_t, or v_t - D_t^T k_t for the delta rule. Lanes lie along V. Columns of S meet nowhere in the forward
// pass, so a block of a few vectors is carried over all tokens before the next: the state that is in use fits in the
// first-level cache for heads of any size.
//
// Backward, with dS the adjoint of S_t:
//   dS += q dy^T,  dq = S_t dy,  dw = dS^T k,  dk = dS w,  dbeta = dw . u,  du = beta dw = dv,
//   delta rule: dk -= D du,  dS -= k du^T,   then  dalpha = rowsum(dS * S_{t-1}),  dS <- diag(alpha) dS.
// States are recomputed from the checkpoints: a chunk once, keeping every eighth state, then eight tokens at a time.
// Dividing a state by its decay instead would lose its digits.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "parallel.h"
#include "plan.h"
#include "vector.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {
namespace {

constexpr int64_t kStep = 8, kSteps = KLA_CHUNK / kStep;

// Vectors per block of columns: five of them per column are live in the backward pass, besides temporaries.
constexpr int kMostVectors = KLA_VECTOR_BYTES == 64 ? 4 : 2;

template <class T>
KLA_INLINE int64_t vectors(int64_t count) { return (count + kLanes<T> - 1) / kLanes<T>; }

template <class T>
KLA_INLINE Vec<T> load_part(const T* x, int64_t count) {
  if (count >= kLanes<T>) return load_any<Vec<T>>(x);
  Vec<T> lanes = {};
  memcpy(&lanes, x, static_cast<size_t>(count) * sizeof(T));
  return lanes;
}

template <class T>
KLA_INLINE void store_part(Vec<T> x, T* to, int64_t count) {
  if (count >= kLanes<T>) store_any(to, x);
  else memcpy(to, &x, static_cast<size_t>(count) * sizeof(T));
}

// The tokens of one row, from an entry of the last axis on.
template <class T>
struct Tokens {
  const T* data;
  int64_t stride;

  Tokens(const kla_array& x, int64_t b, int64_t first)
      : data(x.data == nullptr ? nullptr : static_cast<const T*>(x.data) + b * x.stride_b + first), stride(x.stride_t) {}
  const T* at(int64_t t) const { return data + t * stride; }
};

// The working arrays of one thread. The backward pass needs all of them, the forward pass only the state.
template <class T>
struct Scratch {
  T *state, *adjoint;        // [K, W L]
  T *starts;                 // [kSteps, K, W L]: states before every kStep tokens of a chunk
  T *before;                 // [kStep, K, W L]: states before every token of a step
  T *u;                      // [KLA_CHUNK, W L]
  T *products, *sums;        // [3, K, L] and [3, K], K rounded up to whole vectors: dq, dk, dalpha of a token
  T *token_products, *token_sums;  // the same for one number per token of a step: dalpha, dbeta

  Scratch(Arena& arena, int64_t K, int64_t columns, bool backward) {
    const int64_t size = K * columns, rows = vectors<T>(K) * kLanes<T>, tokens = vectors<T>(kStep) * kLanes<T>;
    state = arena.take<T>(size);
    if (!backward) return;
    adjoint = arena.take<T>(size);
    starts = arena.take<T>(kSteps * size);
    before = arena.take<T>(kStep * size);
    u = arena.take<T>(KLA_CHUNK * columns);
    products = arena.take<T>(3 * rows * kLanes<T>);
    sums = arena.take<T>(3 * rows);
    token_products = arena.take<T>(2 * tokens * kLanes<T>);
    token_sums = arena.take<T>(2 * tokens);
  }
};

// W vectors of columns of one head, from column c0 on.
template <class T, int W, bool DELTA>
class Columns {
 public:
  Columns(const kla_memory_params& params, int64_t b_, int64_t h_, int64_t c0_, const Scratch<T>& scratch)
      : p(params), b(b_), h(h_), c0(c0_), count(std::min<int64_t>(kWidth, params.V - c0_)), m(scratch),
        q(p.q, b, h * p.K), k(p.k, b, h * p.K), v(p.v, b, h * p.V + c0), alpha(p.alpha, b, h * p.decays),
        beta(p.beta, b, h), channel(p.decays == 1 ? 0 : 1) {}

  void forward() {
    get(static_cast<const T*>(p.state_0) + head(), m.state);
    T* y = static_cast<T*>(p.y) + (b * p.T * p.H + h) * p.V + c0;
    Vec<T> r[W] = {};
    if (DELTA && p.T > 0) recall(0, r);
    for (int64_t t = 0; t < p.T; ++t) {
      if (p.checkpoints != nullptr && t % KLA_CHUNK == 0) put(m.state, checkpoint(t / KLA_CHUNK));
      Vec<T> u[W], read[W];
      residual(t, r, u);
      advance<true>(t, std::min(t + 1, p.T - 1), u, read, r);
      for (int j = 0; j < W; ++j) store_part(read[j], y + t * p.H * p.V + j * L, count - j * L);
    }
    put(m.state, static_cast<T*>(p.state) + head());
  }

  template <bool CHANNELS>
  void backward(const kla_memory_grads& g) {
    const Tokens<T> dys(g.dy, b, h * p.V + c0);
    if (g.dstate != nullptr) get(static_cast<const T*>(g.dstate) + head(), m.adjoint);
    else std::fill(m.adjoint, m.adjoint + p.K * kWidth, T(0));
    Vec<T> dy[W], dw[W];
    if (p.T > 0) enter(dys, p.T - 1, dy, dw);
    for (int64_t chunk = (p.T + KLA_CHUNK - 1) / KLA_CHUNK - 1; chunk >= 0; --chunk) {
      const int64_t t0 = chunk * KLA_CHUNK, t1 = std::min(p.T, t0 + KLA_CHUNK);
      replay(t0, t1);
      for (int64_t step = (t1 - t0 - 1) / kStep; step >= 0; --step) {
        const int64_t first = t0 + step * kStep, last = std::min(t1, first + kStep);
        fill_before(first, last, t0);
        for (int64_t t = last - 1; t >= first; --t) walk<CHANNELS>(g, dys, t, first, t0, dy, dw);
        token_sums<CHANNELS>(g, first, last);
      }
    }
    put(m.adjoint, static_cast<T*>(g.dstate_0) + head());
  }

 private:
  static constexpr int L = kLanes<T>, kWidth = W * L;
  const kla_memory_params& p;
  const int64_t b, h, c0, count;
  const Scratch<T>& m;
  const Tokens<T> q, k, v, alpha, beta;
  const int64_t channel;  // from one key channel to the next in alpha

  int64_t head() const { return (b * p.H + h) * p.K * p.V + c0; }

  T* checkpoint(int64_t chunk) const {
    const int64_t chunks = (p.T + KLA_CHUNK - 1) / KLA_CHUNK;
    return static_cast<T*>(p.checkpoints) + ((b * p.H + h) * chunks + chunk) * p.K * p.V + c0;
  }

  KLA_METHOD T rate(int64_t t) const { return beta.data == nullptr ? T(1) : *beta.at(t); }

  // Between a matrix [K, V] and the block [K, W L], whose missing columns are 0.
  void get(const T* from, T* to) const {
    for (int64_t n = 0; n < p.K; ++n)
      for (int j = 0; j < W; ++j) store(to + n * kWidth + j * L, load_part(from + n * p.V + j * L, count - j * L));
  }
  void put(const T* from, T* to) const {
    for (int64_t n = 0; n < p.K; ++n)
      for (int j = 0; j < W; ++j) store_part(load(from + n * kWidth + j * L), to + n * p.V + j * L, count - j * L);
  }

  // r = D^T k of a token, from the state before it.
  void recall(int64_t t, Vec<T>* r) const {
    const T *kt = k.at(t), *at = alpha.at(t);
    for (int j = 0; j < W; ++j) r[j] = Vec<T>{};
    for (int64_t n = 0; n < p.K; ++n)
      for (int j = 0; j < W; ++j) r[j] += kt[n] * at[n * channel] * load(m.state + n * kWidth + j * L);
  }

  KLA_METHOD void residual(int64_t t, const Vec<T>* r, Vec<T>* u) const {
    for (int j = 0; j < W; ++j) {
      u[j] = load_part(v.at(t) + j * L, count - j * L);
      if constexpr (DELTA) u[j] -= r[j];
    }
  }

  // The state takes in token t. In the same pass, reads y and, for the delta rule, r of the next token. Even and odd
  // key channels have sums of their own, because an addition has to wait for the one before it.
  template <bool READ>
  KLA_METHOD void advance(int64_t t, int64_t next, const Vec<T>* u, Vec<T>* y, Vec<T>* r) const {
    const T *qt = q.at(t), *kt = k.at(t), *at = alpha.at(t), *k_next = k.at(next), *a_next = alpha.at(next);
    const T b_t = rate(t);
    Vec<T> w[W], y_sum[2][W] = {}, r_sum[2][W] = {};
    for (int j = 0; j < W; ++j) w[j] = b_t * u[j];
    auto row = [&](int64_t n, int odd) KLA_ALWAYS {
      const T a = at[n * channel], key = kt[n], query = qt[n], key_next = DELTA ? k_next[n] * a_next[n * channel] : T(0);
      T* const s = m.state + n * kWidth;
      for (int j = 0; j < W; ++j) {
        const Vec<T> now = a * load(s + j * L) + key * w[j];
        store(s + j * L, now);
        if constexpr (READ) y_sum[odd][j] += query * now;
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
      if constexpr (READ) y[j] = y_sum[0][j] + y_sum[1][j];
      if constexpr (DELTA) r[j] = r_sum[0][j] + r_sum[1][j];
    }
  }

  // From a checkpoint: u of every token of a chunk, and the state before every step.
  void replay(int64_t t0, int64_t t1) const {
    get(checkpoint(t0 / KLA_CHUNK), m.state);
    Vec<T> r[W] = {};
    if (DELTA) recall(t0, r);
    for (int64_t t = t0; t < t1; ++t) {
      if ((t - t0) % kStep == 0)
        std::copy(m.state, m.state + p.K * kWidth, m.starts + (t - t0) / kStep * p.K * kWidth);
      Vec<T> u[W];
      residual(t, r, u);
      for (int j = 0; j < W; ++j) store(m.u + (t - t0) * kWidth + j * L, u[j]);
      advance<false>(t, std::min(t + 1, t1 - 1), u, nullptr, r);
    }
  }

  // The states before the tokens of a step, each from the one before it.
  void fill_before(int64_t first, int64_t last, int64_t t0) const {
    const int64_t size = p.K * kWidth;
    const T* from = m.starts + (first - t0) / kStep * size;
    std::copy(from, from + size, m.before);
    for (int64_t t = first; t + 1 < last; ++t) {
      const T *kt = k.at(t), *at = alpha.at(t), *s = m.before + (t - first) * size;
      T* const to = m.before + (t + 1 - first) * size;
      const T b_t = rate(t);
      Vec<T> w[W];
      for (int j = 0; j < W; ++j) w[j] = b_t * load(m.u + (t - t0) * kWidth + j * L);
      for (int64_t n = 0; n < p.K; ++n)
        for (int j = 0; j < W; ++j)
          store(to + n * kWidth + j * L, at[n * channel] * load(s + n * kWidth + j * L) + kt[n] * w[j]);
    }
  }

  KLA_METHOD void load_dy(const Tokens<T>& dys, int64_t t, Vec<T>* dy) const {
    for (int j = 0; j < W; ++j)
      dy[j] = dys.data == nullptr ? Vec<T>{} : load_part(dys.at(t) + j * L, count - j * L);
  }

  // The last token's share of the adjoint, dS += q dy^T, and its dw = dS^T k.
  void enter(const Tokens<T>& dys, int64_t t, Vec<T>* dy, Vec<T>* dw) const {
    const T *qt = q.at(t), *kt = k.at(t);
    load_dy(dys, t, dy);
    for (int j = 0; j < W; ++j) dw[j] = Vec<T>{};
    for (int64_t n = 0; n < p.K; ++n)
      for (int j = 0; j < W; ++j) {
        const Vec<T> d = load(m.adjoint + n * kWidth + j * L) + qt[n] * dy[j];
        store(m.adjoint + n * kWidth + j * L, d);
        dw[j] += kt[n] * d;
      }
  }

  // Gradients of token t. The adjoint has its share already; in the same pass it takes in that of the token before,
  // whose dy and dw replace those of t.
  template <bool CHANNELS>
  KLA_METHOD void walk(const kla_memory_grads& g, const Tokens<T>& dys, int64_t t, int64_t first, int64_t t0,
                       Vec<T>* dy, Vec<T>* dw) const {
    const int64_t prev = std::max<int64_t>(t - 1, 0), rows = vectors<T>(p.K) * L;
    const T *qp = q.at(prev), *kp = k.at(prev), *kt = k.at(t), *at = alpha.at(t);
    const T b_t = rate(t);
    T* const dv = static_cast<T*>(g.dv) + ((b * p.T + t) * p.H + h) * p.V + c0;
    Vec<T> w[W], du[W], dy_prev[W], dw_sum[2][W] = {}, along = {}, decay = {};
    if (t > 0) load_dy(dys, prev, dy_prev);
    else std::fill(dy_prev, dy_prev + W, Vec<T>{});
    for (int j = 0; j < W; ++j) {
      const Vec<T> u = load(m.u + (t - t0) * kWidth + j * L);
      along += dw[j] * u;
      w[j] = b_t * u;
      du[j] = b_t * dw[j];
      store_part(du[j], dv + j * L, count - j * L);
    }
    store(m.token_products + (t - first) * L, along);
    const T* const states = m.before + (t - first) * p.K * kWidth;
    auto row = [&](int64_t n, int odd) KLA_ALWAYS {
      const T a = at[n * channel], key = kt[n], query_prev = qp[n], key_prev = kp[n];
      const T* const s = states + n * kWidth;
      T* const d = m.adjoint + n * kWidth;
      Vec<T> dq = {}, dk = {}, da = {};
      for (int j = 0; j < W; ++j) {
        const Vec<T> old = load(s + j * L), decayed = a * old;
        Vec<T> ds = load(d + j * L);
        dq += dy[j] * (decayed + key * w[j]);
        dk += ds * w[j];
        if constexpr (DELTA) {
          dk -= du[j] * decayed;
          ds -= key * du[j];
        }
        da += ds * old;
        ds = a * ds + query_prev * dy_prev[j];
        store(d + j * L, ds);
        dw_sum[odd][j] += key_prev * ds;
      }
      store(m.products + n * L, dq);
      store(m.products + (rows + n) * L, dk);
      if constexpr (CHANNELS) store(m.products + (2 * rows + n) * L, da);
      else decay += da;
    };
    int64_t n = 0;
    for (; n + 1 < p.K; n += 2) {
      row(n, 0);
      row(n + 1, 1);
    }
    if (n < p.K) row(n, 0);
    for (int j = 0; j < W; ++j) {
      dw[j] = dw_sum[0][j] + dw_sum[1][j];
      dy[j] = dy_prev[j];
    }
    const int64_t at_keys = ((b * p.T + t) * p.H + h) * p.K;
    give(m.products, m.sums, p.K, static_cast<T*>(g.dq) + at_keys, 1);
    give(m.products + rows * L, m.sums + rows, p.K, static_cast<T*>(g.dk) + at_keys, 1);
    if constexpr (CHANNELS)
      give(m.products + 2 * rows * L, m.sums + 2 * rows, p.K, static_cast<T*>(g.dalpha) + at_keys, 1);
    else store(m.token_products + (vectors<T>(kStep) * L + t - first) * L, decay);
  }

  // dbeta and the shared dalpha of the tokens of a step.
  template <bool CHANNELS>
  void token_sums(const kla_memory_grads& g, int64_t first, int64_t last) const {
    const int64_t at = (b * p.T + first) * p.H + h, tokens = vectors<T>(kStep) * L;
    if (g.dbeta != nullptr) give(m.token_products, m.token_sums, last - first, static_cast<T*>(g.dbeta) + at, p.H);
    if constexpr (!CHANNELS)
      give(m.token_products + tokens * L, m.token_sums + tokens, last - first, static_cast<T*>(g.dalpha) + at, p.H);
  }

  // Sums over the lanes of `size` vectors, to the output. The first block of columns writes, the others add to it.
  KLA_METHOD void give(const T* products, T* sums, int64_t size, T* to, int64_t stride) const {
    row_sums(products, size, sums);
    if (c0 == 0)
      for (int64_t i = 0; i < size; ++i) to[i * stride] = sums[i];
    else
      for (int64_t i = 0; i < size; ++i) to[i * stride] += sums[i];
  }
};

template <class T, int W, bool DELTA>
void run_columns(const kla_memory_params& p, const kla_memory_grads* g, int64_t task, int64_t c0, const Scratch<T>& m) {
  Columns<T, W, DELTA> columns(p, task / p.H, task % p.H, c0, m);
  if (g == nullptr) columns.forward();
  else if (p.decays == 1) columns.template backward<false>(*g);
  else columns.template backward<true>(*g);
}

template <class T, int W>
void run_width(const kla_memory_params& p, const kla_memory_grads* g, int64_t task, int64_t c0, const Scratch<T>& m) {
  p.delta ? run_columns<T, W, true>(p, g, task, c0, m) : run_columns<T, W, false>(p, g, task, c0, m);
}

// A task is a head of a row; sums over its columns stay inside, in a fixed order.
template <class T>
int run(const kla_memory_params& p, const kla_memory_grads* g) {
  const int64_t needed = vectors<T>(p.V), most = needed < 2 ? 1 : needed < 4 ? 2 : kMostVectors;
  Arena size(nullptr);
  Scratch<T>(size, p.K, most * kLanes<T>, g != nullptr);
  const double useful = static_cast<double>(p.B) * p.T * p.H * p.K * p.V / kMinUpdatesPerThread;
  const int64_t threads = std::max<int64_t>(1, static_cast<int64_t>(std::min<double>(p.threads, useful)));
  Block block(size.used() * static_cast<size_t>(threads));
  if (!block) return KLA_ERROR_MEMORY;
  auto walk = [&](int64_t task, int worker) {
    Arena arena(block.data() + static_cast<size_t>(worker) * size.used());
    const Scratch<T> m(arena, p.K, most * kLanes<T>, g != nullptr);
    for (int64_t done = 0; done < needed;) {
      const int64_t left = needed - done, c0 = done * kLanes<T>;
      if (kMostVectors == 4 && left >= 4) run_width<T, 4>(p, g, task, c0, m), done += 4;
      else if (left >= 2) run_width<T, 2>(p, g, task, c0, m), done += 2;
      else run_width<T, 1>(p, g, task, c0, m), done += 1;
    }
  };
  parallel_for(threads, KLA_POOL_AUTO, p.B * p.H, walk);
  return KLA_OK;
}

}  // namespace

int memory_forward(const kla_memory_params& p) {
  return p.dtype == KLA_FLOAT64 ? run<double>(p, nullptr) : run<float>(p, nullptr);
}

int memory_backward(const kla_memory_params& p, const kla_memory_grads& g) {
  return p.dtype == KLA_FLOAT64 ? run<double>(p, &g) : run<float>(p, &g);
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
