// The arguments of a launch, and its division into segments. One struct for all kernels, passed by value; every
// field is eight bytes wide, so that ops/cuda/params.py can pack it from plain integers.
#ifndef KLA_CUDA_PARAMS_H
#define KLA_CUDA_PARAMS_H

#ifdef KLA_EMULATE_CUDA
#include "emulation/device.h"
#else
// One kernel: launched by this name, with the struct below by value. A multiprocessor should hold at
// least `blocks` blocks of `threads` threads: that bounds the registers.
#define KLA_KERNEL(name, threads, blocks) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const kla::Params p)
#define KLA_SHARED(type, name) __shared__ type name
#define KLA_UNROLL _Pragma("unroll")
#define KLA_ROLLED _Pragma("unroll 1")
#endif
#define KLA_DEVICE __device__ __forceinline__

namespace kla {

using Int = long long;

constexpr int kChunk = 64;  // tokens between two saved beliefs: CHUNK of ops/contract.py
enum DType : Int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 3 };

// A [B, T, *] input whose last axis is contiguous. Strides count elements.
struct Array {
  const void* data;
  Int stride_b, stride_t;
  Int dtype;
};

struct Params {
  Int B, T, N, D;
  Int G, m;              // blocks of slots that share a variance, slots of a block: N = G m
  Int places;            // slots of a block as threads own them: m, rounded up
  Int R;                 // rows: B, or the number of documents
  Int span, segments;    // tokens per segment (a multiple of kChunk), segments of the call
  Int chunks;            // saved beliefs of the call
  Int n0;                // first slot of this launch
  Int block0, blocks;    // first channel block of this launch, and how many it has
  Int dt_width;          // 1 if dt is [B, T, D], 0 if it is [B, T, 1]
  Array v, lam_v;        // [B, T, D]
  Array k, q;            // [B, T, N]
  Array mask;            // [B, T] bytes, data null when every token is real
  Array dt;              // time before every token
  const void *a_bar, *p_bar;        // [G, D], like all that follows in the arithmetic type; with dt
                                    // -log a_bar stands in place of a_bar, and its gradient of da_bar
  const void *mean_0, *variance_0;  // [R, N, D] and [R, G, D], like all means and variances
  const Int* cu_seqlens;            // [R + 1] or null
  void *y, *y_var;         // [B, T, D] in the dtype of v
  void *mean, *variance;   // [R, N, D], [R, G, D]
  void* checkpoints;       // [2, chunks, N, D] or null; the variance of a block is there for every slot
  void* summaries;         // maps of segments, for beliefs [5, segments, N, D] or for adjoints [4, ...]
  void* borders;           // [2, segments, N, D]: beliefs where segments start, adjoints where they end
  void* channel_sums;      // [2 or 3, B, T, D]: sums over the slots of earlier launches
  Array dy, dy_var;        // [B, T, D], data may be null
  const void *dmean, *dvariance;  // [R, N, D], [R, G, D]; may be null
  void *dv, *dlam_v;       // [B, T, D] in the dtypes of the inputs
  void *dk, *dq;           // [B, T, N] in the dtypes of the inputs
  void *da_bar, *dp_bar;   // [G, D]
  void *dmean_0, *dvariance_0;  // [R, N, D], [R, G, D]
  void* ddt;               // [B, T, D], whatever the width of dt
  void* slot_parts;        // [blocks, B, T, 2, slots of a block]: dk and dq per channel block
  void* slot_sums;         // [2, B, T, N]: dk and dq over the channel blocks of earlier launches
  void* dynamics_parts;    // [2, segments, G, D]: da and dp per segment
};

// A run of tokens of one row (or document) that one block processes.
struct Segment {
  bool used, first, last;  // used: it exists; first, last: of its row
  Int row, b;              // row of the state arrays, row of the token arrays
  Int t, tokens;           // first token within row b, number of tokens
  Int chunk;               // slot of its first saved belief
};

KLA_DEVICE Int ceil_div(Int x, Int y) { return (x + y - 1) / y; }

// Documents start anywhere, so segment j of document r has number cu_seqlens[r] / span + r + j: no two
// collide, and a number that belongs to none is not `used`.
KLA_DEVICE Segment segment_at(const Params& p, Int number) {
  Int row, j, begin = 0, length = p.T, chunk;
  if (p.cu_seqlens == nullptr) {
    const Int per_row = p.segments / p.R;
    row = number / per_row;
    j = number % per_row;
    chunk = row * ceil_div(p.T, kChunk);
  } else {
    Int low = 0, high = p.R;  // the last row whose first segment is not beyond `number`
    while (high - low > 1) {
      const Int middle = (low + high) / 2;
      if (p.cu_seqlens[middle] / p.span + middle <= number) low = middle;
      else high = middle;
    }
    row = low;
    begin = p.cu_seqlens[row];
    length = p.cu_seqlens[row + 1] - begin;
    j = number - (begin / p.span + row);
    chunk = begin / kChunk + row;
  }
  const Int from = j * p.span, left = length - from;
  Segment s;
  s.used = j == 0 || left > 0;
  s.first = j == 0;
  s.last = left <= p.span;
  s.row = row;
  s.b = p.cu_seqlens == nullptr ? row : 0;
  s.t = begin + from;
  s.tokens = left < p.span ? left : p.span;
  s.chunk = chunk + from / kChunk;
  return s;
}

// Number of the first segment of a row, and how many it has.
KLA_DEVICE Int first_segment(const Params& p, Int row) {
  return p.cu_seqlens == nullptr ? row * (p.segments / p.R) : p.cu_seqlens[row] / p.span + row;
}

KLA_DEVICE Int count_segments(const Params& p, Int row) {
  const Int length = p.cu_seqlens == nullptr ? p.T : p.cu_seqlens[row + 1] - p.cu_seqlens[row];
  return length == 0 ? 1 : ceil_div(length, p.span);
}

}  // namespace kla
#endif
