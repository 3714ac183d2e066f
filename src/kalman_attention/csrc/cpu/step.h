// A single token per row, for decoding: without staging, tiles or copies of the belief. The arrays of the belief are
// read once, in memory order, and y is accumulated in a row that stays in L1.
#ifndef KLA_CPU_STEP_H
#define KLA_CPU_STEP_H

#include "../lane.h"
#include "forward.h"
#include "gaps.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

template <class T>
struct StepScratch {
  T *v, *lam_v, *dt, *y, *y_var;  // [D]
  T *k, *q;                       // [N]

  StepScratch() = default;
  StepScratch(Arena& arena, int64_t D, int64_t N) {
    for (T** x : {&v, &lam_v, &dt, &y, &y_var}) *x = arena.take<T>(D);
    for (T** x : {&k, &q}) *x = arena.take<T>(N);
  }
};

// One row of the belief, before and after the token.
template <class T>
struct StepRow {
  const T *a, *p, *s, *mu;
  T *s_new, *mu_new;
  int64_t D, m;

  StepRow(const kla_scan_params& p, int64_t r)
      : a(static_cast<const T*>(p.a_bar)), p(static_cast<const T*>(p.p_bar)), D(p.D), m(p.N / p.G) {
    const int64_t variances = r * p.G * D, means = r * p.N * D;
    s = static_cast<const T*>(p.variance_0) + variances;
    mu = static_cast<const T*>(p.mean_0) + means;
    s_new = static_cast<T*>(p.variance) + variances;
    mu_new = static_cast<T*>(p.mean) + means;
  }

  template <bool GAPS, class V>
  KLA_METHOD auto dynamics(int64_t i, V dt) const {
    const V rate = load_any<V>(a + i), noise = load_any<V>(p + i);
    if constexpr (GAPS) return passed<V>(decay_of(rate * dt), noise);
    else return Steady<V>{rate, noise};
  }

  // Block g in the channels from d on: V is a vector or, for the channels that are left over, a number.
  template <class V, bool GAPS, bool VAR>
  KLA_METHOD void step(int64_t g, int64_t d, const StepScratch<T>& x) const {
    const auto at = [](const T* from) { return load_any<V>(from); };
    const T *k = x.k + g * m, *q = x.q + g * m;
    T k2 = 0, q2 = 0;
    for (int64_t n = 0; n < m; ++n) k2 += k[n] * k[n], q2 += q[n] * q[n];
    const auto to = dynamics<GAPS>(g * D + d, GAPS ? at(x.dt + d) : V{});
    const auto next = filter_block<V>(to, k2 * at(x.lam_v + d), at(x.v + d), at(s + g * D + d));
    store_any(s_new + g * D + d, next.s);
    if (VAR) store_any(x.y_var + d, at(x.y_var + d) + q2 * next.s);
    V y = at(x.y + d);
    for (int64_t n = 0, i = g * m * D + d; n < m; ++n, i += D) {
      const V mean = next.keep * at(mu + i) + k[n] * next.gain;
      store_any(mu_new + i, mean);
      y += q[n] * mean;
    }
    store_any(x.y + d, y);
  }
};

// Channels [begin, end) of row r; a range that begins at a multiple of the lanes gives the bits of the whole row.
template <class T, bool GAPS, bool VAR>
void step_channels(const kla_scan_params& p, int64_t r, int64_t begin, int64_t end, const StepScratch<T>& x) {
  const StepRow<T> row(p, r);
  for (int64_t g = 0; g < p.G; ++g) {
    int64_t d = begin;
    for (; d + kLanes<T> <= end; d += kLanes<T>) row.template step<Vec<T>, GAPS, VAR>(g, d, x);
    for (; d < end; ++d) row.template step<T, GAPS, VAR>(g, d, x);
  }
}

template <class T, bool GAPS, bool VAR>
void step_row(const kla_scan_params& p, int64_t r, const StepScratch<T>& x) {
  step_channels<T, GAPS, VAR>(p, r, 0, p.D, x);
}

// A row without a token: the belief stays as it was.
template <class T>
void keep_row(const kla_scan_params& p, int64_t r) {
  const StepRow<T> row(p, r);
  memcpy(row.mu_new, row.mu, static_cast<size_t>(p.N * p.D) * sizeof(T));
  memcpy(row.s_new, row.s, static_cast<size_t>(p.G * p.D) * sizeof(T));
}

template <class T>
void step_task(const kla_scan_params& p, int64_t r, StepScratch<T>& x) {
  const auto load_token = [&](const kla_array& array, int64_t count, T* dst) {
    with_type(array.data, array.dtype, [&](const auto* data) {
      decode_row(data + r * array.stride_b, count, count, dst);
    });
  };
  const auto store_token = [&](const T* src, void* out) {
    with_type(out, p.v.dtype, [&](auto* data) { encode_row(src, p.D, data + r * p.D); });
  };
  std::fill(x.y, x.y + p.D, T(0));
  std::fill(x.y_var, x.y_var + p.D, T(0));
  const char* mask = static_cast<const char*>(p.mask.data);
  if (mask != nullptr && !mask[r * p.mask.stride_b]) {
    keep_row<T>(p, r);
  } else {
    load_token(p.v, p.D, x.v);
    load_token(p.lam_v, p.D, x.lam_v);
    load_token(p.k, p.N, x.k);
    load_token(p.q, p.N, x.q);
    for (int64_t d = 0; d < p.D; ++d) x.v[d] = information(x.v[d], x.lam_v[d]);
    if (p.dt.data) {
      load_token(p.dt, p.dt_channels, x.dt);
      std::fill(x.dt + p.dt_channels, x.dt + p.D, x.dt[0]);
      p.y_var ? step_row<T, true, true>(p, r, x) : step_row<T, true, false>(p, r, x);
    } else {
      p.y_var ? step_row<T, false, true>(p, r, x) : step_row<T, false, false>(p, r, x);
    }
  }
  store_token(x.y, p.y);
  if (p.y_var) store_token(x.y_var, p.y_var);
}

// Needs T = 1, no documents and nothing to save.
template <class T>
int run_step(const kla_scan_params& p) {
  const int64_t threads = std::min(useful_threads(p), std::max<int64_t>(1, p.R));
  Arena measure(nullptr);
  StepScratch<T>(measure, p.D, p.N);
  const Block block(measure.used() * static_cast<size_t>(threads));
  if (!block) return KLA_ERROR_MEMORY;
  auto task = [&](int64_t r, int worker) {
    Arena arena(block.data() + measure.used() * static_cast<size_t>(worker));
    StepScratch<T> x(arena, p.D, p.N);
    step_task(p, r, x);
  };
  parallel_for(threads, p.pool, p.R, task);
  return KLA_OK;
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
