// The exported functions: check, choose the instruction set, run, turn every failure into a status.
#include <exception>
#include <new>

#include "../kla_decode.h"
#include "../kla_scan.h"
#include "kernels.h"
#include "parallel.h"

#if defined(KLA_WITH_AVX) && defined(_MSC_VER)
// What __builtin_cpu_supports calls; clang links it by itself everywhere but here.
#pragma comment(lib, "clang_rt.builtins-x86_64.lib")
#endif

namespace {

bool can_run(int64_t isa) {
  switch (isa) {
    case KLA_ISA_BASELINE:
      return true;
#ifdef KLA_WITH_AVX
    case KLA_ISA_AVX2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#ifdef KLA_EMULATE_AVX512
    case KLA_ISA_AVX512:
      return can_run(KLA_ISA_AVX2);
#else
    case KLA_ISA_AVX512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
#endif
#endif
    default:
      return false;
  }
}

const kla::Kernels* choose(int64_t isa) {
  if (isa == KLA_ISA_AUTO) {
    for (isa = KLA_ISA_AVX512; !can_run(isa); --isa) {
    }
  }
  if (!can_run(isa)) return nullptr;
#ifdef KLA_WITH_AVX
  if (isa == KLA_ISA_AVX512) return &kla::avx512::kernels;
  if (isa == KLA_ISA_AVX2) return &kla::avx2::kernels;
#endif
  return &kla::baseline::kernels;
}

int check(const kla_scan_params* p) {
  if (p == nullptr || p->abi != KLA_ABI_VERSION) return KLA_ERROR_ABI;
  if (p->B < 0 || p->T < 0 || p->N < 0 || p->D < 0 || p->R < 0) return KLA_ERROR_ARGUMENT;
  if (p->compute != KLA_FLOAT32 && p->compute != KLA_FLOAT64) return KLA_ERROR_ARGUMENT;
  if (p->model != KLA_MODEL_KALMAN && p->model != KLA_MODEL_LINEAR) return KLA_ERROR_ARGUMENT;
  if (p->N == 0 || p->D == 0 || p->threads < 1) return KLA_ERROR_ARGUMENT;
  if (p->G < 1 || p->N % p->G != 0) return KLA_ERROR_ARGUMENT;
  if (p->dt.data != nullptr && p->dt_channels != p->D && p->dt_channels != 1) return KLA_ERROR_ARGUMENT;
  if (p->model == KLA_MODEL_LINEAR && (p->G != p->N || p->dt.data != nullptr)) return KLA_ERROR_ARGUMENT;
  if (p->pool == KLA_POOL_OPENMP && kla::pool_in_use() != KLA_POOL_OPENMP) return KLA_ERROR_ARGUMENT;
  return choose(p->isa) ? KLA_OK : KLA_ERROR_ISA;
}

int check(const kla_frames_params* p) {
  if (p == nullptr || p->abi != KLA_ABI_VERSION) return KLA_ERROR_ABI;
  if (p->B < 0 || p->T < 0 || p->R < 0 || p->n_h < 0 || p->G < 1 || p->threads < 1) return KLA_ERROR_ARGUMENT;
  if (p->m < 1 || p->m > KLA_MAX_FRAME) return KLA_ERROR_ARGUMENT;
  if (p->dtype != KLA_FLOAT32 && p->dtype != KLA_FLOAT64) return KLA_ERROR_ARGUMENT;
  return choose(p->isa) ? KLA_OK : KLA_ERROR_ISA;
}

bool few_rows(int64_t R, int64_t threads, int64_t dtype) {
  return R >= 1 && R <= KLA_FEW_ROWS && threads >= 1 && (dtype == KLA_FLOAT32 || dtype == KLA_BFLOAT16);
}

bool has_shape(const kla_matrix& m, int64_t out, int64_t in) {
  return m.weight != nullptr && m.out == out && m.in == in;
}

// Of the passes over rows: softplus and norm.
template <class Params>
int check_rows(const Params* p) {
  if (p == nullptr || p->abi != KLA_ABI_VERSION) return KLA_ERROR_ABI;
  if (p->rows < 0 || p->D < 1 || p->threads < 1) return KLA_ERROR_ARGUMENT;
  if (p->dtype != KLA_FLOAT32 && p->dtype != KLA_BFLOAT16) return KLA_ERROR_ARGUMENT;
  return choose(p->isa) ? KLA_OK : KLA_ERROR_ISA;
}

int check(const kla_softplus_params* p) { return check_rows(p); }
int check(const kla_norm_params* p) { return check_rows(p); }

int check(const kla_memory_params* p) {
  if (p == nullptr || p->abi != KLA_ABI_VERSION) return KLA_ERROR_ABI;
  if (p->B < 0 || p->T < 0 || p->H < 0 || p->K < 1 || p->V < 1 || p->threads < 1) return KLA_ERROR_ARGUMENT;
  if (p->decays != 1 && p->decays != p->K) return KLA_ERROR_ARGUMENT;
  if (p->dtype != KLA_FLOAT32 && p->dtype != KLA_FLOAT64) return KLA_ERROR_ARGUMENT;
  return choose(p->isa) ? KLA_OK : KLA_ERROR_ISA;
}

int check(const kla_product_params* p) {
  if (p == nullptr || p->abi != KLA_ABI_VERSION) return KLA_ERROR_ABI;
  if (!few_rows(p->R, p->threads, p->dtype)) return KLA_ERROR_ARGUMENT;
  if (p->matrix.out < 0 || p->matrix.in < 0) return KLA_ERROR_ARGUMENT;
  return choose(p->isa) ? KLA_OK : KLA_ERROR_ISA;
}

int check(const kla_layer_params* p) {
  if (p == nullptr || p->abi != KLA_ABI_VERSION) return KLA_ERROR_ABI;
  if (!few_rows(p->R, p->threads, p->dtype)) return KLA_ERROR_ARGUMENT;
  if (p->N < 1 || p->D < 1 || p->K < 0 || p->G < 1 || p->N % p->G != 0) return KLA_ERROR_ARGUMENT;
  if (p->link < KLA_LINK_INVERSE_SOFTPLUS || p->link > KLA_LINK_EXP) return KLA_ERROR_ARGUMENT;
  const kla_matrix &precision = p->precision_up, &step = p->step_up;
  if (precision.weight != nullptr && (precision.in < 1 || precision.out != p->D)) return KLA_ERROR_ARGUMENT;
  if (step.weight != nullptr && (step.in < 1 || step.out != p->D || p->raw_dt == nullptr)) return KLA_ERROR_ARGUMENT;
  const int64_t width = p->in_proj.in;
  const int64_t evidence = (p->project_value ? p->D : 0) + (precision.weight ? precision.in : p->D) +
                           (step.weight ? step.in : 0) + 2 * p->N;
  const bool fit = width >= 1 && has_shape(p->in_proj, 2 * p->D, width) &&
                   has_shape(p->evidence_proj, evidence, p->D) && has_shape(p->out_proj, width, p->D);
  if (!fit) return KLA_ERROR_ARGUMENT;
  return choose(p->isa) ? KLA_OK : KLA_ERROR_ISA;
}

template <class Params, class F>
int guarded(const Params* p, F run) {
  if (const int status = check(p)) return status;
  try {
    return run(*choose(p->isa));
  } catch (const std::bad_alloc&) {
    return KLA_ERROR_MEMORY;
  } catch (...) {
    return KLA_ERROR_INTERNAL;
  }
}

}  // namespace

int kla_scan_forward(const kla_scan_params* params) {
  return guarded(params, [&](const kla::Kernels& kernels) { return kernels.forward(*params); });
}

int kla_scan_backward(const kla_scan_params* params, const kla_scan_grads* grads) {
  if (grads == nullptr) return KLA_ERROR_ARGUMENT;
  return guarded(params,
                 [&](const kla::Kernels& kernels) { return kernels.backward(*params, *grads); });
}

int kla_scan_smooth(const kla_scan_params* params) {
  return guarded(params, [&](const kla::Kernels& kernels) { return kernels.smooth(*params); });
}

int kla_scan_smooth_backward(const kla_scan_params* params, const kla_scan_grads* grads) {
  if (grads == nullptr) return KLA_ERROR_ARGUMENT;
  return guarded(params, [&](const kla::Kernels& kernels) {
    return kernels.smooth_backward(*params, *grads);
  });
}

int kla_scan_filter_map(const kla_scan_params* params, void* map) {
  return guarded(params, [&](const kla::Kernels& kernels) { return kernels.filter_map(*params, map); });
}

int kla_scan_adjoint_map(const kla_scan_params* params, const kla_scan_grads* grads, void* map) {
  if (grads == nullptr) return KLA_ERROR_ARGUMENT;
  return guarded(params, [&](const kla::Kernels& kernels) {
    return kernels.adjoint_map(*params, *grads, map);
  });
}

int kla_frames_forward(const kla_frames_params* params) {
  return guarded(params, [&](const kla::Kernels& kernels) { return kernels.frames_forward(*params); });
}

int kla_frames_backward(const kla_frames_params* params, const kla_frames_grads* grads) {
  if (grads == nullptr) return KLA_ERROR_ARGUMENT;
  return guarded(params,
                 [&](const kla::Kernels& kernels) { return kernels.frames_backward(*params, *grads); });
}

int kla_softplus_forward(const kla_softplus_params* params) {
  return guarded(params, [&](const kla::Kernels& kernels) { return kernels.softplus_forward(*params); });
}

int kla_softplus_backward(const kla_softplus_params* params, const kla_softplus_grads* grads) {
  if (grads == nullptr) return KLA_ERROR_ARGUMENT;
  return guarded(params,
                 [&](const kla::Kernels& kernels) { return kernels.softplus_backward(*params, *grads); });
}

int kla_norm_forward(const kla_norm_params* params) {
  return guarded(params, [&](const kla::Kernels& kernels) { return kernels.norm_forward(*params); });
}

int kla_norm_backward(const kla_norm_params* params, const kla_norm_grads* grads) {
  if (grads == nullptr) return KLA_ERROR_ARGUMENT;
  return guarded(params, [&](const kla::Kernels& kernels) { return kernels.norm_backward(*params, *grads); });
}

int kla_memory_forward(const kla_memory_params* params) {
  return guarded(params, [&](const kla::Kernels& kernels) { return kernels.memory_forward(*params); });
}

int kla_memory_backward(const kla_memory_params* params, const kla_memory_grads* grads) {
  if (grads == nullptr) return KLA_ERROR_ARGUMENT;
  return guarded(params, [&](const kla::Kernels& kernels) { return kernels.memory_backward(*params, *grads); });
}

int kla_product(const kla_product_params* params) {
  return guarded(params, [&](const kla::Kernels& kernels) { return kernels.product(*params); });
}

int kla_layer_step(const kla_layer_params* params) {
  return guarded(params, [&](const kla::Kernels& kernels) { return kernels.layer_step(*params); });
}

const char* kla_status_text(int status) {
  switch (status) {
    case KLA_OK: return "ok";
    case KLA_ERROR_ABI: return "the library and its Python loader are of different versions";
    case KLA_ERROR_ISA: return "the processor does not support the requested instruction set";
    case KLA_ERROR_ARGUMENT: return "an argument of the native call is out of range";
    case KLA_ERROR_MEMORY: return "not enough memory for the working arrays of the scan";
    default: return "internal error in the native engine";
  }
}

int64_t kla_abi_version(void) { return KLA_ABI_VERSION; }

int64_t kla_isa_available(void) {
  int64_t bits = 0;
  for (int64_t isa = KLA_ISA_BASELINE; isa <= KLA_ISA_AVX512; ++isa)
    if (can_run(isa)) bits |= int64_t{1} << isa;
  return bits;
}

int64_t kla_pool_in_use(void) { return kla::pool_in_use(); }
