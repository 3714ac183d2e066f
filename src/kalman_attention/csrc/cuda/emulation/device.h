// The parts of CUDA that the kernels use, on the host, so that the unchanged .cu files run in tests.
//
// Blocks run one after another. The threads of a block are fibers: each runs until it reaches a barrier or a
// shuffle and then yields to the next. With a seed the order is drawn at random every time, which reveals missing
// barriers. Shared memory is initialised to NaN in every block.
#ifndef KLA_CUDA_EMULATION_DEVICE_H
#define KLA_CUDA_EMULATION_DEVICE_H

#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define KLA_KERNEL(name, threads, blocks)                                               \
  static void name(const kla::Params p);                                               \
  static const emulation::Kernel emulated_##name(KLA_PROGRAM, #name, threads,          \
    [](const void* p) { name(*static_cast<const kla::Params*>(p)); });                 \
  static void name([[maybe_unused]] const kla::Params p)
#define KLA_SHARED(type, name) type& name = *static_cast<type*>(emulation::shared(sizeof(type)))
#define KLA_UNROLL
#define KLA_ROLLED
#define threadIdx (emulation::self().thread)
#define blockIdx (emulation::self().block)

namespace emulation {

struct Index {
  unsigned x;
};

struct Self {
  Index thread, block;
};

struct Kernel {
  Kernel(const char* program, const char* name, int threads, void (*body)(const void*));
  const char *program, *name;
  int threads;
  void (*body)(const void*);
  const Kernel* next;
};

Self& self();
void* shared(size_t bytes);
void block_barrier();
// Trades 8 bytes with another lane of the warp.
uint64_t exchange(uint64_t bits, int mask);

inline float from_half(unsigned short bits) {
  _Float16 x;
  memcpy(&x, &bits, 2);
  return static_cast<float>(x);
}

inline unsigned short to_half(float x) {
  const _Float16 rounded = static_cast<_Float16>(x);
  unsigned short bits;
  memcpy(&bits, &rounded, 2);
  return bits;
}

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "only the type changes");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace emulation

inline void __syncthreads() { emulation::block_barrier(); }
inline void __syncwarp() { emulation::exchange(0, 0); }

template <class T>
inline T __shfl_xor_sync(unsigned, T x, int mask) {
  uint64_t bits = 0;
  memcpy(&bits, &x, sizeof(x));
  bits = emulation::exchange(bits, mask);
  memcpy(&x, &bits, sizeof(x));
  return x;
}

inline unsigned __float_as_uint(float x) { return emulation::bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulation::bits<float>(x); }

#endif
