// Numbers of any of the four dtypes, to and from the arithmetic type.
#ifndef KLA_CUDA_MEMORY_H
#define KLA_CUDA_MEMORY_H

#include "params.h"

namespace kla {

#ifdef KLA_EMULATE_CUDA
using emulation::from_half;
using emulation::to_half;
#else
// Instructions instead of cuda_fp16.h: NVRTC comes without headers.
KLA_DEVICE float from_half(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

KLA_DEVICE unsigned short to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#endif

KLA_DEVICE float from_bfloat(unsigned short bits) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

KLA_DEVICE unsigned short to_bfloat(float x) {
  const unsigned u = __float_as_uint(x);
  const unsigned rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  return static_cast<unsigned short>(nan ? (u >> 16) | 0x40u : rounded);
}

// The dtype is the same for the whole grid: the branch costs a compare, and one kernel serves any mix.
template <class T>
KLA_DEVICE T read(const void* data, Int dtype, Int i) {
  if constexpr (sizeof(T) == 8)
    if (dtype == kFloat64) return static_cast<const double*>(data)[i];
  if (dtype == kFloat32) return static_cast<const float*>(data)[i];
  const unsigned short bits = static_cast<const unsigned short*>(data)[i];
  return dtype == kFloat16 ? from_half(bits) : from_bfloat(bits);
}

template <class T>
KLA_DEVICE void write(void* data, Int dtype, Int i, T x) {
  if constexpr (sizeof(T) == 8)
    if (dtype == kFloat64) {
      static_cast<double*>(data)[i] = x;
      return;
    }
  const float rounded = static_cast<float>(x);
  if (dtype == kFloat32) static_cast<float*>(data)[i] = rounded;
  else static_cast<unsigned short*>(data)[i] = dtype == kFloat16 ? to_half(rounded) : to_bfloat(rounded);
}

}  // namespace kla
#endif
