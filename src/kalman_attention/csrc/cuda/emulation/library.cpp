// Runs emulated kernels: fibers, barriers, shuffles, and a C entry point.
#include <cstdint>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../params.h"

#undef threadIdx
#undef blockIdx

#if defined(__x86_64__)
// Saves the registers that a call must keep, and takes over the stack of another fiber.
extern "C" void kla_switch(void** from, void* to);
asm(R"(
.text
.type kla_switch, @function
kla_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kla_switch, .-kla_switch
)");
#else
#error "the emulation switches stacks by hand and knows x86-64 only"
#endif

namespace emulation {
namespace {

constexpr size_t kStack = 64 * 1024;
constexpr int kWarp = 32;

const Kernel*& registry() {
  static const Kernel* first = nullptr;
  return first;
}

enum class Waits { kNothing, kWarp, kBlock, kDone };

struct Fiber {
  Self self;
  void* stack_pointer = nullptr;
  std::vector<char> stack;
  Waits waits = Waits::kNothing;
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<uint64_t> traded[2];  // by parity of the shuffle: no lane is two shuffles ahead
  std::vector<unsigned char> parity;
  std::vector<int> at_warp;
  std::vector<int> order;
  int threads = 0, at_block = 0, live = 0, current = 0;
  void* scheduler = nullptr;
  void* shared = nullptr;
  size_t shared_bytes = 0;
  const Kernel* kernel = nullptr;
  const void* params = nullptr;
  std::mt19937 random;
  bool shuffle = false;

  Fiber& fiber() { return fibers[static_cast<size_t>(current)]; }
  void yield() { kla_switch(&fiber().stack_pointer, scheduler); }
  void prepare(const Kernel* chosen, const void* with, uint64_t seed);
  bool run_block(unsigned block);
  void start_fibers(unsigned block);
  void release(int begin, int end, Waits why);
};

thread_local Machine* machine = nullptr;

void enter() {
  machine->kernel->body(machine->params);
  machine->fiber().waits = Waits::kDone;
  --machine->live;
  machine->yield();
  abort();
}

void Machine::prepare(const Kernel* chosen, const void* with, uint64_t seed) {
  kernel = chosen;
  params = with;
  threads = chosen->threads;
  fibers.resize(static_cast<size_t>(threads));
  for (Fiber& fiber : fibers) fiber.stack.resize(kStack);
  for (auto& side : traded) side.assign(static_cast<size_t>(threads), 0);
  parity.assign(static_cast<size_t>(threads), 0);
  at_warp.assign(static_cast<size_t>(threads / kWarp), 0);
  order.resize(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) order[static_cast<size_t>(i)] = i;
  shuffle = seed != 0;
  random.seed(static_cast<uint32_t>(seed));
}

void Machine::start_fibers(unsigned block) {
  live = threads;
  at_block = 0;
  for (int& count : at_warp) count = 0;
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[static_cast<size_t>(i)];
    fiber.self = {{static_cast<unsigned>(i)}, {block}};
    fiber.waits = Waits::kNothing;
    // As if `enter` had been called from nowhere: a return address, above it six saved registers.
    uintptr_t top = reinterpret_cast<uintptr_t>(fiber.stack.data() + kStack) / 16 * 16;
    void** at = reinterpret_cast<void**>(top) - 2;
    *at = reinterpret_cast<void*>(&enter);
    fiber.stack_pointer = at - 6;
  }
}

// False if the block is deadlocked: its threads wait for one another at different places.
bool Machine::run_block(unsigned block) {
  free(shared);
  shared = nullptr;
  start_fibers(block);
  while (live > 0) {
    if (shuffle) std::shuffle(order.begin(), order.end(), random);
    bool moved = false;
    for (int i : order) {
      current = i;
      if (fiber().waits != Waits::kNothing) continue;
      moved = true;
      kla_switch(&scheduler, fiber().stack_pointer);
      if (at_block > 0 && at_block == live) {
        at_block = 0;
        release(0, threads, Waits::kBlock);
      }
    }
    if (!moved) return false;
  }
  return true;
}

void Machine::release(int begin, int end, Waits why) {
  for (int i = begin; i < end; ++i) {
    Fiber& fiber = fibers[static_cast<size_t>(i)];
    if (fiber.waits == why) fiber.waits = Waits::kNothing;
  }
}

}  // namespace

Kernel::Kernel(const char* program_, const char* name_, int threads_, void (*body_)(const void*))
    : program(program_), name(name_), threads(threads_), body(body_), next(registry()) {
  registry() = this;
}

Self& self() { return machine->fiber().self; }

void* shared(size_t bytes) {
  Machine& m = *machine;
  if (m.shared == nullptr) {  // exactly as large as asked for, so that sanitizers see its end
    m.shared = aligned_alloc(16, (bytes + 15) / 16 * 16);
    memset(m.shared, 0xff, bytes);
    m.shared_bytes = bytes;
  }
  if (m.shared_bytes != bytes) abort();
  return m.shared;
}

void block_barrier() {
  machine->fiber().waits = Waits::kBlock;
  ++machine->at_block;
  machine->yield();
}

uint64_t exchange(uint64_t bits, int mask) {
  Machine& m = *machine;
  const int me = m.current, warp = me / kWarp;
  unsigned char& parity = m.parity[static_cast<size_t>(me)];
  std::vector<uint64_t>& traded = m.traded[parity];
  parity ^= 1;
  traded[static_cast<size_t>(me)] = bits;
  if (++m.at_warp[static_cast<size_t>(warp)] == kWarp) {
    m.at_warp[static_cast<size_t>(warp)] = 0;
    m.release(warp * kWarp, (warp + 1) * kWarp, Waits::kWarp);
  } else {
    m.fiber().waits = Waits::kWarp;
    m.yield();
  }
  return traded[static_cast<size_t>(me ^ mask)];
}

}  // namespace emulation

// Runs a kernel over `blocks` blocks; `seed` other than 0 draws the order of the threads.
// Returns 0, 1 if there is no such kernel, 2 for another number of threads or size of the struct, 3 if
// the threads of a block are deadlocked.
extern "C" __attribute__((visibility("default"))) int kla_emulate(const char* program, const char* name,
                                                                  int64_t blocks, int64_t threads,
                                                                  const void* params, int64_t bytes,
                                                                  uint64_t seed) {
  using namespace emulation;
  const Kernel* kernel = registry();
  while (kernel && (strcmp(kernel->program, program) != 0 || strcmp(kernel->name, name) != 0))
    kernel = kernel->next;
  if (kernel == nullptr) return 1;
  if (kernel->threads != threads || bytes != static_cast<int64_t>(sizeof(kla::Params))) return 2;
  static thread_local Machine local;
  machine = &local;
  local.prepare(kernel, params, seed);
  for (int64_t block = 0; block < blocks; ++block)
    if (!local.run_block(static_cast<unsigned>(block))) return 3;
  return 0;
}
