// Keys and queries in the rotating frame (filtering/rotation.py), forward and backward, one pass over time
// each. Frames are products of reflections in float64: over 65,536 tokens they stay orthogonal to 1e-12, and a
// reflection is its own inverse, so the backward pass walks from the last frame to the first and nothing is stored.
//
// Backward. With dQ the gradient with respect to the frame after a token, let A = dQ Q^T, which is the same
// gradient seen from the block itself. A token adds k dk^T + q dq^T to it, where dk = Q dk~. A reflection
// H = 1 - c u u^T, c = 2 / |u|^2, takes it to H A H, and only the skew part S = A - A^T matters:
//   du = c S u = c z,      S <- H S H = S + c (u z^T - z u^T).
#ifndef KLA_CPU_FRAMES_H
#define KLA_CPU_FRAMES_H

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../kla_scan.h"
#include "parallel.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {
namespace {

// Blocks of m slots in registers and arrays of size M >= m, padded with zeros, so that vectors have a fixed length.
template <class T, int M>
class Frames {
  using Vector = double[M];
  struct Block {
    Vector Q[M], Q_transposed[M], S[M];  // the last two in the backward pass only
  };

 public:
  Frames(const kla_frames_params& params, const kla_frames_grads* grads) : p(params), g(grads) {
    // Neighbouring blocks share cache lines, so a task takes as many as possible without leaving a thread idle.
    const int64_t wanted = std::max<int64_t>(1, (threads() + p.R - 1) / std::max<int64_t>(1, p.R));
    size_ = (p.G + wanted - 1) / wanted;
    groups_ = (p.G + size_ - 1) / size_;
    blocks_.resize(static_cast<size_t>(threads() * size_));
  }

  void run() {
    auto walk = [&](int64_t task, int worker) {
      const int64_t row = task / groups_, first = task % groups_ * size_;
      const int64_t last = std::min(p.G, first + size_);
      Block* blocks = blocks_.data() + worker * size_;
      g == nullptr ? forward(row, first, last, blocks) : backward(row, first, last, blocks);
    };
    parallel_for(threads(), KLA_POOL_AUTO, p.R * groups_, walk);
  }

 private:
  const kla_frames_params& p;
  const kla_frames_grads* g;
  int64_t size_, groups_;       // blocks of a task, tasks of a row
  std::vector<Block> blocks_;  // of every worker

  // With less work than 500,000 operations a second thread costs more than it gains.
  int64_t threads() const {
    const double size = static_cast<double>(p.B) * static_cast<double>(p.T) * static_cast<double>(p.G);
    const double work = size * static_cast<double>(p.m * p.m * (p.n_h + 1)) / 500000;
    return std::max<int64_t>(1, work < static_cast<double>(p.threads) ? static_cast<int64_t>(work) : p.threads);
  }

  int64_t batch(int64_t row) const { return p.cu_seqlens == nullptr ? row : 0; }
  int64_t begin(int64_t row) const { return p.cu_seqlens == nullptr ? 0 : p.cu_seqlens[row]; }
  int64_t end(int64_t row) const { return p.cu_seqlens == nullptr ? p.T : p.cu_seqlens[row + 1]; }

  bool real(int64_t b, int64_t t) const {
    const auto* mask = static_cast<const uint8_t*>(p.mask.data);
    return mask == nullptr || mask[b * p.mask.stride_b + t * p.mask.stride_t] != 0;
  }

  static const T* place(const kla_array& x, int64_t b, int64_t t) {
    return static_cast<const T*>(x.data) + b * x.stride_b + t * x.stride_t;
  }

  T* dense(void* x, int64_t b, int64_t t, int64_t width) const {
    return static_cast<T*>(x) + (b * p.T + t) * width;
  }

  void load(const T* x, Vector& out) const {
    for (int i = 0; i < M; ++i) out[i] = i < p.m ? static_cast<double>(x[i]) : 0.0;
  }

  void store(const Vector& x, T* out) const {
    for (int64_t i = 0; i < p.m; ++i) out[i] = static_cast<T>(x[i]);
  }

  // A^T x, row by row of A.
  static void transposed_times(const Vector (&A)[M], const Vector& x, Vector& out) {
    for (int j = 0; j < M; ++j) out[j] = 0;
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < M; ++j) out[j] += x[i] * A[i][j];
  }

  // A += x y^T
  static void add_product(const Vector& x, const Vector& y, Vector (&A)[M]) {
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < M; ++j) A[i][j] += x[i] * y[j];
  }

  // A += x y^T - y x^T
  static void add_skew(const Vector& x, const Vector& y, Vector (&A)[M]) {
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < M; ++j) A[i][j] += x[i] * y[j] - y[i] * x[j];
  }

  // c = 2 / |u|^2; 0 without a direction, which is no reflection.
  double reflection(int64_t b, int64_t t, int64_t h, int64_t n, Vector& u) const {
    load(place(p.u_h, b, t) + (h * p.G + n) * p.m, u);
    double length = 0;
    for (int i = 0; i < M; ++i) length += u[i] * u[i];
    return length > 0 ? 2 / length : 0.0;
  }

  // Q <- (1 - c u u^T) Q, and what was added is u x^T.
  static void reflect(const Vector& u, double c, Vector (&Q)[M], Vector& x) {
    transposed_times(Q, u, x);
    for (int j = 0; j < M; ++j) x[j] *= -c;
    add_product(u, x, Q);
  }

  void forward(int64_t row, int64_t first, int64_t last, Block* blocks) const {
    for (int64_t n = first; n < last; ++n)
      for (int i = 0; i < M; ++i)
        for (int j = 0; j < M; ++j) blocks[n - first].Q[i][j] = i == j;
    const int64_t b = batch(row), N = p.G * p.m;
    for (int64_t t = begin(row); t < end(row); ++t) {
      T *q = dense(p.q_turned, b, t, N), *k = dense(p.k_turned, b, t, N);
      if (!real(b, t)) {
        std::fill(q + first * p.m, q + last * p.m, T{0});
        std::fill(k + first * p.m, k + last * p.m, T{0});
        continue;
      }
      for (int64_t n = first; n < last; ++n) {
        Block& block = blocks[n - first];
        Vector u, x;
        for (int64_t h = 0; h < p.n_h; ++h) {
          const double c = reflection(b, t, h, n, u);
          reflect(u, c, block.Q, x);
        }
        turn(block, place(p.q, b, t) + n * p.m, q + n * p.m);
        turn(block, place(p.k, b, t) + n * p.m, k + n * p.m);
      }
    }
    for (int64_t n = first; n < last; ++n)
      for (int64_t i = 0; i < p.m; ++i)
        std::copy_n(blocks[n - first].Q[i], p.m, p.frame + ((row * p.G + n) * p.m + i) * p.m);
  }

  void turn(const Block& block, const T* k, T* turned) const {
    Vector x, y;
    load(k, x);
    transposed_times(block.Q, x, y);
    store(y, turned);
  }

  void backward(int64_t row, int64_t first, int64_t last, Block* blocks) const {
    for (int64_t n = first; n < last; ++n) start(row * p.G + n, blocks[n - first]);
    const int64_t b = batch(row), N = p.G * p.m;
    for (int64_t t = end(row) - 1; t >= begin(row); --t) {
      T *dq = dense(g->dq, b, t, N), *dk = dense(g->dk, b, t, N), *du_h = dense(g->du_h, b, t, p.n_h * N);
      if (!real(b, t)) {
        std::fill(dq + first * p.m, dq + last * p.m, T{0});
        std::fill(dk + first * p.m, dk + last * p.m, T{0});
        for (int64_t h = 0; h < p.n_h; ++h)
          std::fill(du_h + h * N + first * p.m, du_h + h * N + last * p.m, T{0});
        continue;
      }
      for (int64_t n = first; n < last; ++n) {
        Block& block = blocks[n - first];
        add_token(p.q, g->dq_turned, b, t, n, dq + n * p.m, block);
        add_token(p.k, g->dk_turned, b, t, n, dk + n * p.m, block);
        for (int64_t h = p.n_h - 1; h >= 0; --h) undo(b, t, h, n, du_h + h * N + n * p.m, block);
      }
    }
  }

  // The last frame, and S from the gradient with respect to it.
  void start(int64_t at, Block& block) const {
    const double* Q = p.frame + at * p.m * p.m;
    const double* dQ = g->dframe == nullptr ? nullptr : g->dframe + at * p.m * p.m;
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < M; ++j) {
        const bool inside = i < p.m && j < p.m;
        block.Q[i][j] = inside ? Q[i * p.m + j] : i == j;
        block.Q_transposed[j][i] = block.Q[i][j];
        block.S[i][j] = 0;
        for (int64_t l = 0; inside && dQ != nullptr && l < p.m; ++l)
          block.S[i][j] += dQ[i * p.m + l] * Q[j * p.m + l] - dQ[j * p.m + l] * Q[i * p.m + l];
      }
  }

  // What a key or query k, seen as k~ = Q^T k, adds: dk = Q dk~, and k dk^T to A.
  void add_token(const kla_array& k, const kla_array& dk_turned, int64_t b, int64_t t, int64_t n, T* out,
                 Block& block) const {
    if (dk_turned.data == nullptr) return std::fill(out, out + p.m, T{0});
    Vector x, dk;
    load(place(dk_turned, b, t) + n * p.m, x);
    transposed_times(block.Q_transposed, x, dk);
    store(dk, out);
    load(place(k, b, t) + n * p.m, x);
    add_skew(x, dk, block.S);
  }

  void undo(int64_t b, int64_t t, int64_t h, int64_t n, T* out, Block& block) const {
    Vector u, x, du;
    const double c = reflection(b, t, h, n, u);
    transposed_times(block.S, u, x);  // S^T u = -S u
    for (int i = 0; i < M; ++i) du[i] = -c * x[i];
    store(du, out);
    add_skew(u, du, block.S);
    reflect(u, c, block.Q, x);
    add_product(x, u, block.Q_transposed);
  }
};

template <class T>
int run_frames(const kla_frames_params& p, const kla_frames_grads* g) {
  if (p.m <= 2) Frames<T, 2>(p, g).run();
  else if (p.m <= 4) Frames<T, 4>(p, g).run();
  else if (p.m <= 8) Frames<T, 8>(p, g).run();
  else if (p.m <= 16) Frames<T, 16>(p, g).run();
  else Frames<T, KLA_MAX_FRAME>(p, g).run();
  return KLA_OK;
}

int frames_forward(const kla_frames_params& p) {
  return p.dtype == KLA_FLOAT64 ? run_frames<double>(p, nullptr) : run_frames<float>(p, nullptr);
}

int frames_backward(const kla_frames_params& p, const kla_frames_grads& g) {
  return p.dtype == KLA_FLOAT64 ? run_frames<double>(p, &g) : run_frames<float>(p, &g);
}

}  // namespace
}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
