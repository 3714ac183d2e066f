// The division of work. A lane is one slot n of one channel d. A group of threads of a warp shares a channel, and
// each owns SLOTS neighbouring slots; the other lanes of the warp are neighbouring channels.
//
// Where slots share a variance, the slots of a thread belong to one block, and a block takes a power of two of
// threads, so some places may be empty. Each of these threads computes the variance of the block by itself, from
// |k|^2 in shared memory; only adjoints have to be summed over them.
#ifndef KLA_CUDA_LANES_H
#define KLA_CUDA_LANES_H

#include "gaps.h"

namespace kla {

constexpr unsigned kFullWarp = 0xffffffffu;

// What a program is compiled for: arithmetic type, threads per channel, slots that share a variance, gaps.
template <class T_, int GROUP, bool SHARED, bool GAPS>
struct Config {
  using T = T_;
  static constexpr int kGroup = GROUP;
  static constexpr bool kShared = SHARED, kGaps = GAPS, kDouble = sizeof(T) == 8;
};

template <class C, int SLOTS, int THREADS>
struct Lanes {
  using T = typename C::T;
  static constexpr int kWarps = THREADS / 32;
  static constexpr int kWide = 32 / C::kGroup;           // channels of a warp
  static constexpr int kChannels = THREADS / C::kGroup;  // channels of a block of threads
  static constexpr int kSlots = C::kGroup * SLOTS;       // places of slots of a block of threads
  static constexpr int kOwn = C::kShared ? 1 : SLOTS;    // variances of a thread
  static constexpr int kBlocks = C::kShared ? C::kGroup : 1;  // room for what blocks of slots share
  using Own = Dynamics<T, C::kGaps, kOwn>;

  int thread, lane, warp;
  int channel, slot;  // within the block of threads: of this thread, and the first of its SLOTS places
  int block;          // first thread of its block of slots within the channel
  int partners;       // threads of that block
  int count;          // slots that it really has
  Int d0, n0;         // channel 0 and place 0 of the block of threads
  Int n, g;           // first slot, and its block of slots
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
    n = slot_at(p, slot);
    g = n;
    partners = 1;
    Int left = p.N - n;
    if constexpr (C::kShared) {
      const Int place = (n0 + slot) % p.places;
      g = (n0 + slot) / p.places;
      partners = static_cast<int>(p.places) / SLOTS;
      left = g < p.G ? p.m - place : 0;
    }
    block = slot / SLOTS / partners * partners;
    count = d0 + channel < p.D && left > 0 ? static_cast<int>(left < SLOTS ? left : SLOTS) : 0;
    segment = segment_at(p, number);
  }

  // The variance of slot i.
  KLA_DEVICE static constexpr int own(int i) { return C::kShared ? 0 : i; }

  // Whether this thread speaks for its block of slots.
  KLA_DEVICE bool leads() const { return !C::kShared || slot / SLOTS == block; }

  // Slot at a place of the block of threads; N or more if there is none.
  KLA_DEVICE Int slot_at(const Params& p, int place) const {
    if constexpr (!C::kShared) return n0 + place;
    const Int block_of = (n0 + place) / p.places, within = (n0 + place) % p.places;
    return within < p.m ? block_of * p.m + within : p.N;
  }

  // Offset of slot i of this thread in matrix `row` of a [*, N, D] array.
  KLA_DEVICE Int at(const Params& p, Int row, int i) const { return (row * p.N + n + i) * p.D + d0 + channel; }

  // Lanes beyond N or D hold zeros, which every step maps to zeros.
  KLA_DEVICE void load(const Params& p, const void* from, Int row, T (&x)[SLOTS]) const {
    for (int i = 0; i < SLOTS; ++i)
      x[i] = from != nullptr && i < count ? static_cast<const T*>(from)[at(p, row, i)] : T(0);
  }

  KLA_DEVICE void store(const Params& p, void* to, Int row, const T (&x)[SLOTS]) const {
    for (int i = 0; i < SLOTS; ++i)
      if (i < count) static_cast<T*>(to)[at(p, row, i)] = x[i];
  }

  // The same for what slots share, in an array that has it for every slot.
  KLA_DEVICE void load_each(const Params& p, const void* from, Int row, T (&x)[kOwn]) const {
    for (int o = 0; o < kOwn; ++o)
      x[o] = o < count ? static_cast<const T*>(from)[at(p, row, o)] : T(0);
  }

  KLA_DEVICE void store_each(const Params& p, void* to, Int row, const T (&x)[kOwn]) const {
    for (int i = 0; i < SLOTS; ++i)
      if (i < count) static_cast<T*>(to)[at(p, row, i)] = x[own(i)];
  }

  // And in a [*, G, D] array.
  KLA_DEVICE bool has_block(const Params& p, int o) const { return d0 + channel < p.D && g + o < p.G; }

  KLA_DEVICE void load_blocks(const Params& p, const void* from, Int row, T (&x)[kOwn]) const {
    for (int o = 0; o < kOwn; ++o) {
      const Int here = (row * p.G + g + o) * p.D + d0 + channel;
      x[o] = from != nullptr && has_block(p, o) ? static_cast<const T*>(from)[here] : T(0);
    }
  }

  KLA_DEVICE void store_blocks(const Params& p, void* to, Int row, const T (&x)[kOwn]) const {
    for (int o = 0; o < kOwn; ++o)
      if (leads() && has_block(p, o)) static_cast<T*>(to)[(row * p.G + g + o) * p.D + d0 + channel] = x[o];
  }

  KLA_DEVICE Own dynamics(const Params& p) const {
    Own found;
    load_blocks(p, p.a_bar, 0, found.a);
    load_blocks(p, p.p_bar, 0, found.p);
    found.prepare();
    return found;
  }

  // Sum over the threads of a block of slots, in a fixed order.
  KLA_DEVICE T block_sum(T x) const {
    for (int step = kWide; step < kWide * partners; step *= 2) x += __shfl_xor_sync(kFullWarp, x, step);
    return x;
  }

  // Copies `count` tokens from token t of the segment on into shared memory, with 0 where there is none.
  // `width` is the distance between channels.
  template <int ROWS>
  KLA_DEVICE void stage_channels(const Params& p, const Array& x, Int t, T (&to)[ROWS][kChannels],
                                 Int width = 1) const {
    KLA_ROLLED
    for (int i = thread; i < ROWS * kChannels; i += THREADS) {
      const int j = i / kChannels, c = i % kChannels;
      const bool inside = x.data != nullptr && t + j < segment.tokens && d0 + c < p.D;
      to[j][c] = inside ? read<T>(x.data, x.dtype, token(x, t + j) + (d0 + c) * width) : T(0);
    }
  }

  // Values and their precisions. Each thread looks once more at the entries that it has just written itself.
  template <int ROWS>
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

  template <int ROWS>
  KLA_DEVICE void stage_slots(const Params& p, const Array& x, Int t, T (&to)[ROWS][kSlots]) const {
    KLA_ROLLED
    for (int i = thread; i < ROWS * kSlots; i += THREADS) {
      const int j = i / kSlots;
      const Int at_n = slot_at(p, i % kSlots);
      const bool inside = t + j < segment.tokens && at_n < p.N;
      to[j][i % kSlots] = inside ? read<T>(x.data, x.dtype, token(x, t + j) + at_n) : T(0);
    }
  }

  // Squared length of every block's part of x, at the place of the block's first thread.
  template <int ROWS>
  KLA_DEVICE void stage_squares(const Params& p, const Array& x, Int t, T (&to)[ROWS][kBlocks]) const {
    if constexpr (!C::kShared) return;
    KLA_ROLLED
    for (int i = thread; i < ROWS * kBlocks; i += THREADS) {
      const int j = i / kBlocks, first = i % kBlocks;
      if (first % partners != 0) continue;
      const Int at_n = slot_at(p, first * SLOTS);
      T sum = T(0);
      if (t + j < segment.tokens && at_n < p.N)
        for (Int k = 0; k < p.m; ++k) {
          const T part = read<T>(x.data, x.dtype, token(x, t + j) + at_n + k);
          sum += part * part;
        }
      to[j][first] = sum;
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

// Sums each of COUNT values over the lanes of a warp that differ in the bits STEP, 2 STEP ... END / 2. As long as
// there are several values, partners exchange half of them, so that n values take n - 1 shuffles instead of
// n log n. Afterwards a lane has the sums number `first` (returned) to first + kKept;
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
