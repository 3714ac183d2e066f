// Runs numbered tasks on several threads. Any thread may run any task, but tasks depend on the shape alone and
// write to separate memory, so the result is always the same.
#ifndef KLA_CPU_PARALLEL_H
#define KLA_CPU_PARALLEL_H

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kla {

using TaskFn = void (*)(void* context, int64_t task, int worker);

// Calls fn for every task in [0, tasks), with worker < threads. Denormals are flushed to zero inside
// (with p = 0 the variance decays through them) and the caller's mode is restored.
void parallel_for(int64_t threads, int64_t pool, int64_t tasks, TaskFn fn, void* context);

// The kla_pool value that KLA_POOL_AUTO stands for in this process.
int64_t pool_in_use();

template <class F>
void parallel_for(int64_t threads, int64_t pool, int64_t tasks, F& f) {
  parallel_for(
      threads, pool, tasks,
      [](void* context, int64_t task, int worker) { (*static_cast<F*>(context))(task, worker); }, &f);
}

// Calls f(task, values) for every task, which fills `size` values, and returns their sums over the tasks.
template <class F>
std::vector<float> parallel_sums(int64_t threads, int64_t pool, int64_t tasks, int64_t size, const F& f) {
  std::vector<float> values(static_cast<size_t>(tasks * size)), sums(static_cast<size_t>(size));
  auto fill = [&](int64_t task, int) { f(task, values.data() + task * size); };
  parallel_for(threads, pool, tasks, fill);
  for (int64_t i = 0; i < size; ++i) {
    double sum = 0;
    for (int64_t task = 0; task < tasks; ++task) sum += values[static_cast<size_t>(task * size + i)];
    sums[static_cast<size_t>(i)] = static_cast<float>(sum);
  }
  return sums;
}

}  // namespace kla
#endif
