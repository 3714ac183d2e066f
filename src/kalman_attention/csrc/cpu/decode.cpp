// Decoding, compiled once per instruction set; apart from kernel.cpp, whose many loops take the compiler minutes.
#include "kernels.h"

#include "layer.h"
#include "product.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

int product(const kla_product_params& p) {
  return p.dtype == KLA_BFLOAT16 ? run_product<BFloat>(p) : run_product<float>(p);
}

int layer_step(const kla_layer_params& p) {
  return p.dtype == KLA_BFLOAT16 ? run_layer_step<BFloat>(p) : run_layer_step<float>(p);
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
