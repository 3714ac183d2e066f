// What each instruction set's copy of the kernel offers to the dispatcher.
#ifndef KLA_CPU_KERNELS_H
#define KLA_CPU_KERNELS_H

#include "../kla_scan.h"

namespace kla {

struct Kernels {
  int (*forward)(const kla_scan_params&);
  int (*backward)(const kla_scan_params&, const kla_scan_grads&);
  int (*smooth)(const kla_scan_params&);
  int (*filter_map)(const kla_scan_params&, void*);
  int (*adjoint_map)(const kla_scan_params&, const kla_scan_grads&, void*);
  int (*frames_forward)(const kla_frames_params&);
  int (*frames_backward)(const kla_frames_params&, const kla_frames_grads&);
};

namespace baseline {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace kla
#endif
