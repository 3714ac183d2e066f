/* The C interface of decoding: one token per row through the matrices and layers of a model. The rules of
 * kla_scan.h apply: fields are eight bytes wide, and letters are those of docs/notation.md. */
#ifndef KLA_DECODE_H
#define KLA_DECODE_H

#include "kla_scan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A matrix as nn.Linear stores it, [out, in], and its bias [out], which may be NULL. */
typedef struct kla_matrix {
  const void *weight, *bias;
  int64_t out, in;
} kla_matrix;

#define KLA_FEW_ROWS 4 /* largest number of rows that share one reading of a matrix */

/* y = x W^T + bias for at most KLA_FEW_ROWS rows. Arrays are float32 or bfloat16, arithmetic is float32. */
typedef struct kla_product_params {
  int64_t abi;     /* KLA_ABI_VERSION */
  int64_t isa;     /* kla_isa */
  int64_t threads; /* upper bound; results do not depend on it */
  int64_t dtype;   /* KLA_FLOAT32 or KLA_BFLOAT16: of all arrays */
  int64_t R;
  kla_matrix matrix;
  const void* x; /* [R, in] */
  void* y;       /* [R, out] */
} kla_product_params;

/* How a projection becomes a precision (nn/links.py). */
enum kla_link { KLA_LINK_INVERSE_SOFTPLUS = 0, KLA_LINK_SOFTPLUS = 1, KLA_LINK_EXP = 2 };

/* One token per row through a KLA layer (nn/kla.py), for at most KLA_FEW_ROWS rows. Arithmetic is float32. */
typedef struct kla_layer_params {
  int64_t abi;     /* KLA_ABI_VERSION */
  int64_t isa;     /* kla_isa */
  int64_t threads; /* upper bound; results do not depend on it */
  int64_t dtype;   /* KLA_FLOAT32 or KLA_BFLOAT16: of all arrays but dynamics and belief, which are float32 */
  int64_t R, N, G, D, K;         /* K taps of the convolution, 0 for none */
  int64_t project_value;         /* evidence_proj gives the value too; otherwise it is the stream */
  int64_t qk_norm, link;         /* kla_link */
  double floor;                  /* of the link */
  double norm_eps, readout_eps;
  double step_scale;             /* a token takes step_scale softplus(step + raw_dt), if there is a step_up */
  const void* norm;              /* [width], the norm before the layer; NULL without norm and residual */
  kla_matrix in_proj;            /* [2 D, width]: stream and gate */
  const void *conv_weight, *conv_bias; /* [K, D], and [D] or NULL */
  kla_matrix evidence_proj;      /* [D or 0 (value) + D or rank (precision) + rank or 0 (step) + N (key) + N (query), D] */
  kla_matrix precision_up;       /* [D, rank]; weight NULL if evidence_proj gives the precision itself */
  kla_matrix step_up;            /* [D, rank]; weight NULL if every token takes one unit of time */
  const float* raw_dt;           /* [D], with a step_up */
  const void *gate_bias, *skip, *readout_norm; /* [D], may be NULL */
  kla_matrix out_proj;           /* [width, D] */
  const float *a_bar, *p_bar;    /* [G, D]; with a step_up l and s_inf, as in kla_scan.h */
  const char* mask;              /* [R] bytes, NULL when every row has a token */
  const void* x;                 /* [R, width] */
  const void* window;            /* [R, K - 1, D] */
  const float *mean_0, *variance_0; /* [R, N, D] and [R, G, D] */
  void* y;                       /* [R, width]: x + layer(norm(x)), or layer(x) */
  void* new_window;              /* [R, K - 1, D] */
  float *mean, *variance;        /* [R, N, D] and [R, G, D] */
} kla_layer_params;

KLA_EXPORT int kla_product(const kla_product_params* params);
KLA_EXPORT int kla_layer_step(const kla_layer_params* params);

#ifdef __cplusplus
}
#endif
#endif
