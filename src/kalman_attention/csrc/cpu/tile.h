// The working arrays of a task, in L1 or L2: what a core loop reads and writes besides the stage.
#ifndef KLA_CPU_TILE_H
#define KLA_CPU_TILE_H

#include "plan.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

// Belief and dynamics of one channel group, [N, width] each.
template <class T>
struct State {
  T *s, *mu, *a, *p;
  State(Arena& arena, int64_t N, int64_t width) {
    for (T** x : {&s, &mu, &a, &p}) *x = arena.take<T>(N * width);
  }
};

// A chunk replayed for one tile and a block of slots: [chunk + 1, slots, tile] beliefs and the r of
// each step.
template <class T>
struct Trajectory {
  T *s, *mu, *r;
  Trajectory(Arena& arena, int64_t tokens, int64_t lanes) {
    for (T** x : {&s, &mu, &r}) *x = arena.take<T>((tokens + 1) * lanes);
  }
};

// Adjoints of one channel group.
template <class T>
struct Adjoint {
  T *dy, *dy_var;      // [chunk, width]
  T *acc_v, *acc_lam;  // [chunk, width], sums over slots
  T *dmu, *ds;         // [N, width], of the belief
  T *da, *dp;          // [N, width], of the dynamics, this chunk
  T *dk, *dq;          // [chunk * N, lanes], sums over tiles, one vector per (token, slot)

  Adjoint(Arena& arena, int64_t tokens, int64_t N, int64_t width) {
    for (T** x : {&dy, &dy_var, &acc_v, &acc_lam}) *x = arena.take<T>(tokens * width);
    for (T** x : {&dmu, &ds, &da, &dp}) *x = arena.take<T>(N * width);
    for (T** x : {&dk, &dq}) *x = arena.take<T>((tokens * N + kLanes<T>) * kLanes<T>);
  }

  __attribute__((always_inline)) void add_slot(int64_t slot, bool first, Vec<T> dk_, Vec<T> dq_) {
    T *k = dk + slot * kLanes<T>, *q = dq + slot * kLanes<T>;
    store(k, first ? dk_ : load(k) + dk_);
    store(q, first ? dq_ : load(q) + dq_);
  }
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
