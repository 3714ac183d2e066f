// A single token per row, for decoding: no stage, no tiles, no copies of the belief. The [N, D] arrays
// are streamed once, in memory order, and y is collected in a row that stays in L1.
#ifndef KLA_CPU_STEP_H
#define KLA_CPU_STEP_H

#include "../lane.h"
#include "forward.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

template <class T>
struct StepScratch {
  T *v, *lam_v, *y, *y_var;  // [D]
  T *k, *q;                  // [N]

  StepScratch(Arena& arena, const kla_scan_params& p) {
    for (T** x : {&v, &lam_v, &y, &y_var}) *x = arena.take<T>(p.D);
    for (T** x : {&k, &q}) *x = arena.take<T>(p.N);
  }
};

// One slot of one row: V is a vector or, for the channels that are left over, a single number.
template <class T, class V, bool VAR>
KLA_INLINE void step_lane(T k, T q, const T* a, const T* p, const T* lam_v, const T* lv, const T* s,
                          const T* mu, T* s_new, T* mu_new, T* y, T* y_var) {
  const auto at = [](const T* x) { return load_any<V>(x); };
  const auto put = [](T* x, V value) { store_any(x, value); };
  const auto next = filter_step<V>(at(a), at(p), (k * k) * at(lam_v), k * at(lv), at(s), at(mu));
  put(s_new, next.s);
  put(mu_new, next.mu);
  put(y, at(y) + q * next.mu);
  if (VAR) put(y_var, at(y_var) + (q * q) * next.s);
}

template <class T, bool VAR>
void step_row(const kla_scan_params& p, int64_t r, StepScratch<T>& x) {
  constexpr int L = kLanes<T>;
  const T *a = static_cast<const T*>(p.a_bar), *pb = static_cast<const T*>(p.p_bar);
  const T *s = state_row<T>(p.variance_0, p, r), *mu = state_row<T>(p.mean_0, p, r);
  T *s_new = state_row<T>(p.variance, p, r), *mu_new = state_row<T>(p.mean, p, r);
  for (int64_t n = 0; n < p.N; ++n) {
    const T k = x.k[n], q = x.q[n];
    const int64_t i = n * p.D;
    int64_t d = 0;
    for (; d + L <= p.D; d += L)
      step_lane<T, Vec<T>, VAR>(k, q, a + i + d, pb + i + d, x.lam_v + d, x.v + d, s + i + d,
                                mu + i + d, s_new + i + d, mu_new + i + d, x.y + d, x.y_var + d);
    for (; d < p.D; ++d)
      step_lane<T, T, VAR>(k, q, a + i + d, pb + i + d, x.lam_v + d, x.v + d, s + i + d, mu + i + d,
                           s_new + i + d, mu_new + i + d, x.y + d, x.y_var + d);
  }
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
    const size_t bytes = static_cast<size_t>(p.N * p.D) * sizeof(T);
    memcpy(state_row<T>(p.mean, p, r), state_row<T>(p.mean_0, p, r), bytes);
    memcpy(state_row<T>(p.variance, p, r), state_row<T>(p.variance_0, p, r), bytes);
  } else {
    load_token(p.v, p.D, x.v);
    load_token(p.lam_v, p.D, x.lam_v);
    load_token(p.k, p.N, x.k);
    load_token(p.q, p.N, x.q);
    for (int64_t d = 0; d < p.D; ++d) x.v[d] = x.lam_v[d] * seen(x.v[d], x.lam_v[d]);
    p.y_var ? step_row<T, true>(p, r, x) : step_row<T, false>(p, r, x);
  }
  store_token(x.y, p.y);
  if (p.y_var) store_token(x.y_var, p.y_var);
}

// Needs T = 1, no documents and nothing to save.
template <class T>
int run_step(const kla_scan_params& p) {
  const int64_t threads = std::min(useful_threads(p), std::max<int64_t>(1, p.R));
  Arena measure(nullptr);
  StepScratch<T>(measure, p);
  const Block block(measure.used() * static_cast<size_t>(threads));
  if (!block) return KLA_ERROR_MEMORY;
  auto task = [&](int64_t r, int worker) {
    Arena arena(block.data() + measure.used() * static_cast<size_t>(worker));
    StepScratch<T> x(arena, p);
    step_task(p, r, x);
  };
  parallel_for(threads, p.pool, p.R, task);
  return KLA_OK;
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
