// Who works on what. A lane is one slot n of one channel d. GROUP threads of a warp share a channel and
// own SLOTS neighbouring slots each; the other 32 / GROUP lanes of the warp are neighbouring channels.
#ifndef KLA_CUDA_LANES_H
#define KLA_CUDA_LANES_H

#include "../segment.h"
#include "memory.h"

namespace kla {

constexpr unsigned kFullWarp = 0xffffffffu;

template <int GROUP, int SLOTS, int THREADS>
struct Lanes {
  static constexpr int kWarps = THREADS / 32;
  static constexpr int kWide = 32 / GROUP;             // channels of a warp
  static constexpr int kChannels = THREADS / GROUP;    // channels of a block
  static constexpr int kSlots = GROUP * SLOTS;         // slots of a block

  int thread, lane, warp;
  int channel, slot;  // within the block: of this thread, and the first of its SLOTS
  Int d0, n0;         // channel 0 and slot 0 of the block
  Int number;         // of the segment
  Segment segment;

  KLA_DEVICE explicit Lanes(const Params& p) {
    thread = static_cast<int>(threadIdx.x);
    lane = thread % 32;
    warp = thread / 32;
    channel = warp * kWide + lane % kWide;
    slot = lane / kWide * SLOTS;
    const Int index = blockIdx.x;
    number = index / p.blocks;
    d0 = (p.block0 + index % p.blocks) * kChannels;
    n0 = p.n0;
    segment = segment_at(p, number);
  }

  KLA_DEVICE bool exists(const Params& p, int i) const {
    return d0 + channel < p.D && n0 + slot + i < p.N;
  }

  // Offset of slot i of this thread in matrix `row` of a [*, N, D] array.
  KLA_DEVICE Int at(const Params& p, Int row, int i) const {
    return (row * p.N + n0 + slot + i) * p.D + d0 + channel;
  }

  // Lanes beyond N or D hold zeros, which every step maps to zeros.
  template <class T>
  KLA_DEVICE void load(const Params& p, const void* from, Int row, T (&x)[SLOTS]) const {
    for (int i = 0; i < SLOTS; ++i)
      x[i] = from != nullptr && exists(p, i) ? static_cast<const T*>(from)[at(p, row, i)] : T(0);
  }

  template <class T>
  KLA_DEVICE void store(const Params& p, void* to, Int row, const T (&x)[SLOTS]) const {
    for (int i = 0; i < SLOTS; ++i)
      if (exists(p, i)) static_cast<T*>(to)[at(p, row, i)] = x[i];
  }

  // Copies `count` tokens from token t of the segment on into shared memory, with 0 where there is none.
  template <class T, int ROWS>
  KLA_DEVICE void stage_channels(const Params& p, const Array& x, Int t, T (&to)[ROWS][kChannels]) const {
    KLA_ROLLED
    for (int i = thread; i < ROWS * kChannels; i += THREADS) {
      const int j = i / kChannels, c = i % kChannels;
      const bool inside = x.data != nullptr && t + j < segment.tokens && d0 + c < p.D;
      to[j][c] = inside ? read<T>(x.data, x.dtype, token(x, t + j) + d0 + c) : T(0);
    }
  }

  // Values and their precisions. Each thread looks once more at the entries that it has just written itself.
  template <class T, int ROWS>
  KLA_DEVICE void stage_values(const Params& p, Int t, T (&v)[ROWS][kChannels],
                               T (&lam_v)[ROWS][kChannels]) const {
    stage_channels(p, p.v, t, v);
    stage_channels(p, p.lam_v, t, lam_v);
    KLA_ROLLED
    for (int i = thread; i < ROWS * kChannels; i += THREADS) {
      const int j = i / kChannels, c = i % kChannels;
      v[j][c] = seen<T>(v[j][c], lam_v[j][c]);
    }
  }

  template <class T, int ROWS>
  KLA_DEVICE void stage_slots(const Params& p, const Array& x, Int t, T (&to)[ROWS][kSlots]) const {
    KLA_ROLLED
    for (int i = thread; i < ROWS * kSlots; i += THREADS) {
      const int j = i / kSlots, n = i % kSlots;
      const bool inside = t + j < segment.tokens && n0 + n < p.N;
      to[j][n] = inside ? read<T>(x.data, x.dtype, token(x, t + j) + n0 + n) : T(0);
    }
  }

  template <int ROWS>
  KLA_DEVICE void stage_mask(const Params& p, Int t, bool (&real)[ROWS]) const {
    KLA_ROLLED
    for (int j = thread; j < ROWS; j += THREADS) {
      const auto* mask = static_cast<const unsigned char*>(p.mask.data);
      real[j] = t + j < segment.tokens && (mask == nullptr || mask[token(p.mask, t + j)] != 0);
    }
  }

  KLA_DEVICE Int token(const Array& x, Int t) const {
    return segment.b * x.stride_b + (segment.t + t) * x.stride_t;
  }

  // Row of token t of the segment in a dense [B, T, *] array.
  KLA_DEVICE Int dense(const Params& p, Int t) const { return segment.b * p.T + segment.t + t; }
};

// Sums each of COUNT values over the lanes of a warp that differ in the bits STEP, 2 STEP ... END / 2.
// While there are several values, partners hand each other half of them, so that n values take n - 1
// shuffles and not n log n. Afterwards a lane has the sums number `first` (returned) to first + kKept;
// `owner` picks one lane for each.
template <int COUNT, int STEP, int END>
struct WarpSum {
  static constexpr int kLanes = END / STEP;
  static constexpr int kKept = COUNT > kLanes ? COUNT / kLanes : 1;
  static constexpr int kRest = COUNT > kLanes ? STEP : END / COUNT;  // bits below this hold copies

  KLA_DEVICE static bool owner(int lane) { return (lane & (kRest - STEP)) == 0; }

  template <class T>
  KLA_DEVICE static int run(T* x, int lane) {
    if constexpr (END <= STEP) {
      return 0;
    } else if constexpr (COUNT == 1) {
      x[0] += __shfl_xor_sync(kFullWarp, x[0], END / 2);
      return WarpSum<1, STEP, END / 2>::run(x, lane);
    } else {
      constexpr int kHalf = COUNT / 2;
      const bool upper = (lane & (END / 2)) != 0;
      for (int i = 0; i < kHalf; ++i) {
        const T give = upper ? x[i] : x[i + kHalf];
        const T keep = upper ? x[i + kHalf] : x[i];
        x[i] = keep + __shfl_xor_sync(kFullWarp, give, END / 2);
      }
      return (upper ? kHalf : 0) + WarpSum<kHalf, STEP, END / 2>::run(x, lane);
    }
  }
};

}  // namespace kla
#endif
