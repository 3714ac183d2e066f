#include "parallel.h"

#ifndef _WIN32
#include <dlfcn.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "../kla_scan.h"

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

namespace kla {
namespace {

// Denormals flushed (FTZ and DAZ on x86, FZ on ARM) while an instance lives.
class FlushDenormals {
 public:
#if defined(__x86_64__) || defined(__i386__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ | (1ull << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

// Torch's own OpenMP pool, looked up in the process instead of linked: a second pool would compete with
// torch's for the same cores. Set once, when the library is loaded.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

#ifdef _WIN32
// Torch's pool has another interface there, and processes do not fork.
struct LoadTime {
  GompParallel gomp = nullptr;
  int pid = 0;
};
int getpid() { return 0; }
#else
struct LoadTime {
  GompParallel gomp = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  pid_t pid = getpid();
};
#endif
const LoadTime load_time;

struct Job {
  TaskFn fn;
  void* context;
  int64_t tasks;
  std::atomic<int64_t> next_task{0};
  std::atomic<int> next_worker{0};
};

void work(void* data) {
  Job& job = *static_cast<Job*>(data);
  FlushDenormals flush;
  const int worker = job.next_worker.fetch_add(1);
  for (int64_t task; (task = job.next_task.fetch_add(1)) < job.tasks;)
    job.fn(job.context, task, worker);
}

void work_on_new_threads(Job& job, int64_t threads) {
  std::vector<std::thread> helpers;
  try {
    helpers.reserve(static_cast<size_t>(threads - 1));
    for (int64_t i = 1; i < threads; ++i) helpers.emplace_back(work, &job);
  } catch (const std::system_error&) {
    // Fewer threads than asked for finish the same tasks.
  } catch (const std::bad_alloc&) {
  }
  work(&job);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

int64_t pool_in_use() {
  // The threads of an OpenMP pool do not survive a fork, and entering it in the child would hang.
  const bool usable = load_time.gomp != nullptr && load_time.pid == getpid();
  return usable ? KLA_POOL_OPENMP : KLA_POOL_THREADS;
}

void parallel_for(int64_t threads, int64_t pool, int64_t tasks, TaskFn fn, void* context) {
  Job job{fn, context, tasks};
  threads = std::min(threads, tasks);
  if (threads <= 1) return work(&job);
  if (pool == KLA_POOL_AUTO) pool = pool_in_use();
  if (pool == KLA_POOL_OPENMP) return load_time.gomp(work, &job, static_cast<unsigned>(threads), 0);
  work_on_new_threads(job, threads);
}

}  // namespace kla
