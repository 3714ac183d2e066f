/* The C interface of the native CPU engine: raw pointers, no torch headers.
 *
 * Every field is eight bytes wide, so that a caller without a C compiler can build the structs by
 * packing 64-bit integers in order. Letters are those of docs/notation.md. Strides count elements.
 */
#ifndef KLA_SCAN_H
#define KLA_SCAN_H

#include <stdint.h>

#define KLA_ABI_VERSION 9
#define KLA_CHUNK 64 /* tokens between two saved beliefs */

#ifdef __cplusplus
extern "C" {
#endif

enum kla_dtype { KLA_FLOAT32 = 0, KLA_FLOAT64 = 1, KLA_FLOAT16 = 2, KLA_BFLOAT16 = 3 };
enum kla_isa { KLA_ISA_AUTO = 0, KLA_ISA_BASELINE = 1, KLA_ISA_AVX2 = 2, KLA_ISA_AVX512 = 3 };
enum kla_pool { KLA_POOL_AUTO = 0, KLA_POOL_THREADS = 1, KLA_POOL_OPENMP = 2 };

/* KLA_MODEL_LINEAR is the first-order scan h' = exp(dt A) h + dt B x, y = sum_n C h. It uses the same
 * struct: v = x, lam_v = dt, k = B, q = C, a_bar = A, mean = h; p_bar, variance, y_var are NULL. */
enum kla_model { KLA_MODEL_KALMAN = 0, KLA_MODEL_LINEAR = 1 };

enum kla_status {
  KLA_OK = 0,
  KLA_ERROR_ABI = 1,
  KLA_ERROR_ISA = 2,
  KLA_ERROR_ARGUMENT = 3,
  KLA_ERROR_MEMORY = 4,
  KLA_ERROR_INTERNAL = 5
};

/* A [B, T, *] input whose last axis is contiguous. */
typedef struct kla_array {
  const void* data;
  int64_t stride_b, stride_t;
  int64_t dtype;
} kla_array;

typedef struct kla_scan_params {
  int64_t abi;     /* KLA_ABI_VERSION */
  int64_t model;   /* kla_model */
  int64_t compute; /* KLA_FLOAT32 or KLA_FLOAT64: type of the arithmetic and of every state */
  int64_t isa;     /* kla_isa */
  int64_t pool;    /* kla_pool */
  int64_t threads; /* upper bound; results do not depend on it */
  int64_t B, T, N, G, D;        /* the N slots form G blocks of neighbours that share a variance */
  int64_t R;                    /* rows: B, or the number of documents */
  kla_array v, lam_v;           /* [B, T, D] */
  kla_array k, q;               /* [B, T, N] */
  kla_array mask;               /* [B, T] bytes, data NULL when every token is real */
  kla_array dt;                 /* [B, T, dt_channels], data NULL where every gap is 1 */
  int64_t dt_channels;          /* D, or 1 for a gap that all channels share */
  const void *a_bar, *p_bar;    /* [G, D]; with dt their logarithm l and limit, see below */
  const void *mean_0, *variance_0; /* [R, N, D] and [R, G, D] */
  const int64_t* cu_seqlens;    /* [R + 1] or NULL */
  void *y, *y_var;              /* [B, T, D] in the dtype of v; y_var may be NULL */
  void *mean, *variance;        /* [R, N, D] and [R, G, D] */
  void* checkpoints;            /* means [num_chunks, N, D], then variances [num_chunks, G, D]; written by
                                   forward if not NULL */
} kla_scan_params;

/* With dt, a_bar holds l = log a_bar < 0 and p_bar the stationary variance s_inf = p_bar / (1 - a_bar^2): a gap
 * decays by a = e^(l dt) and adds the noise s_inf (1 - a^2). For a_bar = 1 the caller passes a tiny l, which
 * gives the correct limits. da_bar and dp_bar then receive sums over tokens, with y = -2 l dt, dP the adjoint
 * of the predicted variance and du that of l dt through the decay alone: sum l dt du - s_inf S dP and
 * sum (1 - a^2) dP. S is 1 - (1 + y) e^-y, but -y e^-y for rates below KLA_FAST_RATE. ops/cpu/scan.py converts
 * them to gradients of a_bar and p_bar. */
#define KLA_FAST_RATE -0.375

typedef struct kla_scan_grads {
  kla_array dy, dy_var;         /* [B, T, D], data may be NULL */
  const void *dmean, *dvariance; /* [R, N, D] and [R, G, D], may be NULL */
  void *dv, *dlam_v;            /* [B, T, D] in the dtypes of the inputs */
  void *dk, *dq;                /* [B, T, N] */
  void *da_bar, *dp_bar;        /* [G, D] */
  void *dmean_0, *dvariance_0;  /* [R, N, D] and [R, G, D] */
  void* ddt;                    /* [B, T, dt_channels] in the dtype of dt; NULL without dt */
} kla_scan_grads;

/* The short causal convolution of a layer: y_t = bias + sum_j weight[j] x_{t - K + 1 + j}, float32. */
typedef struct kla_conv_params {
  int64_t abi;     /* KLA_ABI_VERSION */
  int64_t threads; /* upper bound; results do not depend on it */
  int64_t B, T, D, K;
  const float* x;  /* [B, T, D], last axis contiguous */
  int64_t stride_b, stride_t;
  const float* window; /* [B, K - 1, D]: the tokens before x */
  const float* weight; /* [K, D] */
  const float* bias;   /* [D] */
  float* y;            /* [B, T, D]; written by forward */
} kla_conv_params;

typedef struct kla_conv_grads {
  const float* dy; /* [B, T, D], last axis contiguous */
  int64_t stride_b, stride_t;
  float *dx, *dwindow, *dweight, *dbias; /* like x (dense), window, weight, bias */
} kla_conv_grads;

/* Keys and queries in the frame that rotates with blocks of m slots (filtering/rotation.py): with
 * Q_t = U_t ... U_1 and U_t = H_{n_h} ... H_1, H = 1 - 2 u u^T / |u|^2, writes Q_t^T q and Q_t^T k. */
typedef struct kla_frames_params {
  int64_t abi;     /* KLA_ABI_VERSION */
  int64_t isa;     /* kla_isa */
  int64_t threads; /* upper bound; results do not depend on it */
  int64_t dtype;   /* KLA_FLOAT32 or KLA_FLOAT64: type of all arrays but the frame */
  int64_t B, T, G, m, n_h;
  int64_t R;                 /* rows: B, or the number of documents; each starts with Q = 1 */
  kla_array q, k;            /* [B, T, G m] */
  kla_array u_h;             /* [B, T, n_h G m] */
  kla_array mask;            /* [B, T] bytes, data NULL when every token is real; padding does not rotate */
  const int64_t* cu_seqlens; /* [R + 1] or NULL */
  void *q_turned, *k_turned; /* [B, T, G m]; written by forward */
  double* frame;             /* [R, G, m, m]: Q_T, written by forward, read by backward */
} kla_frames_params;

typedef struct kla_frames_grads {
  kla_array dq_turned, dk_turned; /* [B, T, G m], data may be NULL */
  const double* dframe;           /* [R, G, m, m], may be NULL */
  void *dq, *dk, *du_h;           /* dense, like q, k, u_h */
} kla_frames_grads;

/* y = scale (softplus(x + bias) + floor), or scale / (softplus(x + bias) + floor). */
typedef struct kla_softplus_params {
  int64_t abi;     /* KLA_ABI_VERSION */
  int64_t isa;     /* kla_isa */
  int64_t threads; /* upper bound; results do not depend on it */
  int64_t dtype;   /* KLA_FLOAT32 or KLA_BFLOAT16: type of x and dx */
  int64_t rows, D;
  const void* x;      /* [rows, D]: neighbouring entries, rows `stride` apart */
  int64_t stride;
  const float* bias;  /* [D] or NULL */
  int64_t inverse;    /* 1 for the second form */
  double floor, scale;
  float* y;           /* [rows, D]; written by forward, read by backward */
} kla_softplus_params;

typedef struct kla_softplus_grads {
  const float* dy; /* [rows, D] */
  void* dx;        /* [rows, D], dense */
  float* dbias;    /* [D] or NULL */
} kla_softplus_grads;

/* y = weight x / sqrt(mean(x^2) + eps) over the last axis, computed in float32. */
typedef struct kla_norm_params {
  int64_t abi;     /* KLA_ABI_VERSION */
  int64_t isa;     /* kla_isa */
  int64_t threads; /* upper bound; results do not depend on it */
  int64_t dtype;   /* KLA_FLOAT32 or KLA_BFLOAT16: type of x, y, dy and dx */
  int64_t rows, D;
  const void* x;       /* [rows, D]: neighbouring entries, rows `stride` apart */
  int64_t stride;
  const float* weight; /* [D] or NULL */
  double eps;
  void* y;             /* [rows, D]; written by forward */
} kla_norm_params;

typedef struct kla_norm_grads {
  const void* dy; /* [rows, D] */
  void* dx;       /* [rows, D] */
  float* dweight; /* [D] or NULL */
} kla_norm_grads;

/* The matrix memory of the baselines, for every row and head: with the state S [K, V],
 *   D = diag(alpha) S,   w = beta v or, with delta, beta (v - D^T k),   S' = D + k w^T,   y = S'^T q. */
typedef struct kla_memory_params {
  int64_t abi;     /* KLA_ABI_VERSION */
  int64_t isa;     /* kla_isa */
  int64_t threads; /* upper bound; results do not depend on it */
  int64_t dtype;   /* KLA_FLOAT32 or KLA_FLOAT64: type of all arrays */
  int64_t B, T, H, K, V;
  int64_t decays;       /* decays per head: K, or 1 that all key channels share */
  int64_t delta;        /* 1 for the delta rule */
  kla_array q, k;       /* [B, T, H K] */
  kla_array v;          /* [B, T, H V] */
  kla_array alpha;      /* [B, T, H decays] */
  kla_array beta;       /* [B, T, H], data NULL for 1 */
  const void* state_0;  /* [B, H, K, V] */
  void* y;              /* [B, T, H, V] */
  void* state;          /* [B, H, K, V] */
  void* checkpoints;    /* [B, H, chunks, K, V]: the state before each KLA_CHUNK tokens; written by forward if not
                           NULL, read by backward */
  void* residual;       /* [B, T, H, V]: v - D^T k; for the delta rule as for checkpoints, otherwise unused */
} kla_memory_params;

typedef struct kla_memory_grads {
  kla_array dy;         /* [B, T, H V], data may be NULL */
  const void* dstate;   /* [B, H, K, V], may be NULL */
  void *dq, *dk, *dv;   /* dense, like q, k, v */
  void *dalpha, *dbeta; /* dense, like alpha and beta; dbeta NULL without beta */
  void* dstate_0;       /* [B, H, K, V] */
} kla_memory_grads;

#define KLA_MAX_FRAME 32 /* largest m */

#ifdef _WIN32
#define KLA_EXPORT __declspec(dllexport)
#else
#define KLA_EXPORT __attribute__((visibility("default")))
#endif

KLA_EXPORT int kla_scan_forward(const kla_scan_params* params);
KLA_EXPORT int kla_scan_backward(const kla_scan_params* params, const kla_scan_grads* grads);
/* y and y_var given all tokens, including later ones, from the checkpoints of a forward pass. */
KLA_EXPORT int kla_scan_smooth(const kla_scan_params* params);
/* Gradients of the smoothed y and y_var, and of the final belief of the filter; reads no checkpoints. */
KLA_EXPORT int kla_scan_smooth_backward(const kla_scan_params* params, const kla_scan_grads* grads);
/* The effect of every row on any belief that enters it (segment.h), for callers that split time themselves: the
 * concatenation of s, mu, gain, J, eta, of which mu and eta are [R, N, D] and the others [R, G, D]; reads neither
 * q nor the belief. */
KLA_EXPORT int kla_scan_filter_map(const kla_scan_params* params, void* map);
/* The same for the adjoint, given the checkpoints, dy and dy_var: gain, cross, dmu_0, ds_0, of which cross and
 * dmu_0 are [R, N, D] and the others [R, G, D]. */
KLA_EXPORT int kla_scan_adjoint_map(const kla_scan_params* params, const kla_scan_grads* grads, void* map);
KLA_EXPORT int kla_conv_forward(const kla_conv_params* params);
KLA_EXPORT int kla_conv_backward(const kla_conv_params* params, const kla_conv_grads* grads);
KLA_EXPORT int kla_frames_forward(const kla_frames_params* params);
KLA_EXPORT int kla_frames_backward(const kla_frames_params* params, const kla_frames_grads* grads);
KLA_EXPORT int kla_softplus_forward(const kla_softplus_params* params);
KLA_EXPORT int kla_softplus_backward(const kla_softplus_params* params, const kla_softplus_grads* grads);
KLA_EXPORT int kla_norm_forward(const kla_norm_params* params);
KLA_EXPORT int kla_norm_backward(const kla_norm_params* params, const kla_norm_grads* grads);
KLA_EXPORT int kla_memory_forward(const kla_memory_params* params);
KLA_EXPORT int kla_memory_backward(const kla_memory_params* params, const kla_memory_grads* grads);
KLA_EXPORT const char* kla_status_text(int status);
KLA_EXPORT int64_t kla_abi_version(void);
/* Bit i is set when kla_isa value i can run here. */
KLA_EXPORT int64_t kla_isa_available(void);
/* The pool that KLA_POOL_AUTO means in this process: a kla_pool value. */
KLA_EXPORT int64_t kla_pool_in_use(void);

#ifdef __cplusplus
}
#endif
#endif
