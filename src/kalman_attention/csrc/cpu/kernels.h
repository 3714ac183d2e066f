// What each instruction set's copy of the kernel offers to the dispatcher.
#ifndef KLA_CPU_KERNELS_H
#define KLA_CPU_KERNELS_H

#include "../kla_scan.h"

struct kla_product_params;
struct kla_layer_params;

namespace kla {

struct Kernels {
  int (*forward)(const kla_scan_params&);
  int (*backward)(const kla_scan_params&, const kla_scan_grads&);
  int (*smooth)(const kla_scan_params&);
  int (*smooth_backward)(const kla_scan_params&, const kla_scan_grads&);
  int (*filter_map)(const kla_scan_params&, void*);
  int (*adjoint_map)(const kla_scan_params&, const kla_scan_grads&, void*);
  int (*frames_forward)(const kla_frames_params&);
  int (*frames_backward)(const kla_frames_params&, const kla_frames_grads&);
  int (*softplus_forward)(const kla_softplus_params&);
  int (*softplus_backward)(const kla_softplus_params&, const kla_softplus_grads&);
  int (*norm_forward)(const kla_norm_params&);
  int (*norm_backward)(const kla_norm_params&, const kla_norm_grads&);
  int (*memory_forward)(const kla_memory_params&);
  int (*memory_backward)(const kla_memory_params&, const kla_memory_grads&);
  int (*product)(const kla_product_params&);
  int (*layer_step)(const kla_layer_params&);
};

namespace baseline {
extern const Kernels kernels;
int softplus_forward(const kla_softplus_params&);
int softplus_backward(const kla_softplus_params&, const kla_softplus_grads&);
int norm_forward(const kla_norm_params&);
int norm_backward(const kla_norm_params&, const kla_norm_grads&);
int memory_forward(const kla_memory_params&);
int memory_backward(const kla_memory_params&, const kla_memory_grads&);
int product(const kla_product_params&);
int layer_step(const kla_layer_params&);
}
namespace avx2 {
extern const Kernels kernels;
int softplus_forward(const kla_softplus_params&);
int softplus_backward(const kla_softplus_params&, const kla_softplus_grads&);
int norm_forward(const kla_norm_params&);
int norm_backward(const kla_norm_params&, const kla_norm_grads&);
int memory_forward(const kla_memory_params&);
int memory_backward(const kla_memory_params&, const kla_memory_grads&);
int product(const kla_product_params&);
int layer_step(const kla_layer_params&);
}
namespace avx512 {
extern const Kernels kernels;
int softplus_forward(const kla_softplus_params&);
int softplus_backward(const kla_softplus_params&, const kla_softplus_grads&);
int norm_forward(const kla_norm_params&);
int norm_backward(const kla_norm_params&, const kla_norm_grads&);
int memory_forward(const kla_memory_params&);
int memory_backward(const kla_memory_params&, const kla_memory_grads&);
int product(const kla_product_params&);
int layer_step(const kla_layer_params&);
}

}  // namespace kla
#endif
