// The table of slot counts that have core loops of their own, with a constant trip count; all others share
// a general loop, and so do models that have only that one (kKnownSlots). W is the width of a tile, 4 for one or two slots (kernel.cpp).
#ifndef KLA_CPU_SLOTS_H
#define KLA_CPU_SLOTS_H

#include <cstdint>
#include <type_traits>

#include "vector.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

template <int N>
using Slots = std::integral_constant<int, N>;

// Calls f with the number of slots as a constant, or with 0 for "any".
template <class M, int W, class F>
KLA_INLINE void with_slots(int64_t slots, F f) {
  if constexpr (!M::kKnownSlots) {
    return f(Slots<0>{});
  } else if constexpr (W == 4) {
    return slots == 1 ? f(Slots<1>{}) : f(Slots<2>{});
  } else {
    switch (slots) {
      case 8: return f(Slots<8>{});
#ifndef KLA_FEW_SLOTS  // with sanitizers every size takes the compiler minutes
      case 4: return f(Slots<4>{});
      case 16: return f(Slots<16>{});
      case 32: return f(Slots<32>{});
      case 64: return f(Slots<64>{});
#endif
      default: return f(Slots<0>{});
    }
  }
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
