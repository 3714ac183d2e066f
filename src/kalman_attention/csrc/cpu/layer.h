// One token per row through a KLA layer, for decoding: the computation of nn/kla.py without the overhead of torch
// operations, which would take several times as long as reading the weights from memory.
#ifndef KLA_CPU_LAYER_H
#define KLA_CPU_LAYER_H

#include <cmath>

#include "exp.h"
#include "product.h"
#include "step.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

// Rows of scratch arrays have this length for n numbers: whole vectors, which may be read and written beyond n.
KLA_INLINE int64_t padded(int64_t n) { return (n + kLanes<float> - 1) / kLanes<float> * kLanes<float>; }

// x = f(x, i) in whole vectors; x is a row of a scratch array.
template <class F>
KLA_INLINE void map_row(float* x, int64_t n, F f) {
  for (int64_t i = 0; i < n; i += kLanes<float>) store(x + i, f(load(x + i), i));
}

KLA_INLINE double sum_of_squares(const float* x, int64_t n) {
  constexpr int64_t kChains = 16;  // independent sums: a single one would wait for each of its additions
  double sums[kChains] = {}, sum = 0;
  int64_t i = 0;
  for (; i + kChains <= n; i += kChains)
    for (int64_t c = 0; c < kChains; ++c) sums[c] += double(x[i + c]) * x[i + c];
  for (; i < n; ++i) sum += double(x[i]) * x[i];
  for (double part : sums) sum += part;
  return sum;
}

// S is the type of weights and tokens.
template <class S>
class LayerStep {
 public:
  LayerStep(Arena& arena, const kla_layer_params& params)
      : p(params), width(p.in_proj.in), wide(padded(width)), D(p.D), deep(padded(D)), first(p.project_value ? D : 0),
        step(first + (p.precision_up.weight ? p.precision_up.in : D)), key(step + (steps() ? p.step_up.in : 0)) {
    x = arena.take<float>(p.R * wide);
    h = arena.take<float>(p.R * wide);
    stream = arena.take<float>(p.R * deep);
    gate = arena.take<float>(p.R * deep);
    evidence = arena.take<float>(p.R * p.evidence_proj.out);
    latent = arena.take<float>(p.R * deep);
    for (int64_t r = 0; r < p.R; ++r) token[r] = StepScratch<float>(arena, D, p.N);
  }

  void run() {
    for (int64_t r = 0; r < p.R; ++r) normalise(r);
    Matrix<S>(p.in_proj)
        .multiply(p.R, p.norm ? h : x, wide, p.threads, [&](auto r, auto o, auto count, const float* from) {
          for (int64_t j = 0; j < count; ++j)  // a piece may start in the stream and end in the gate
            (o + j < D ? stream + r * deep : gate + r * deep - D)[o + j] = from[j];
        });
    for (int64_t r = 0; r < p.R; ++r) convolve(r);
    Matrix<S>(p.evidence_proj)
        .multiply(p.R, stream, deep, p.threads, [&](auto r, auto o, auto count, const float* from) {
          std::copy(from, from + count, evidence + r * p.evidence_proj.out + o);
        });
    expand(p.precision_up, first, &StepScratch<float>::lam_v);
    expand(p.step_up, step, &StepScratch<float>::dt);
    for (int64_t r = 0; r < p.R; ++r) observe(r);
    steps() ? filter<true>() : filter<false>();
    for (int64_t r = 0; r < p.R; ++r) read_out(r);
    S* y = static_cast<S*>(p.y);
    Matrix<S>(p.out_proj).multiply(p.R, latent, deep, p.threads, [&](auto r, auto o, auto count, float* from) {
      const float* residual = x + r * wide + o;
      for (int64_t j = 0; j < count; ++j)
        from[j] = (real(r) ? from[j] : 0.0f) + (p.norm ? residual[j] : 0.0f);
      encode_row(from, count, y + r * width + o);
    });
  }

 private:
  const kla_layer_params& p;
  const int64_t width, wide, D, deep;
  const int64_t first, step, key;             // where precision, step and key begin in the evidence
  float *x, *h;                               // [R, wide]: the token, before and after the norm
  float *stream, *gate, *latent;              // [R, deep]
  float* evidence;                            // [R, evidence_proj.out]
  StepScratch<float> token[KLA_FEW_ROWS];

  bool steps() const { return p.step_up.weight != nullptr; }

  bool real(int64_t r) const { return p.mask == nullptr || p.mask[r]; }

  static const S* typed(const void* data) { return static_cast<const S*>(data); }

  // x / rms(x) times a gain.
  static void rms_norm(const float* from, const void* gain, int64_t n, double eps, float* to) {
    const float scale = static_cast<float>(1.0 / std::sqrt(sum_of_squares(from, n) / double(n) + eps));
    for (int64_t i = 0; i < n; ++i) to[i] = from[i] * scale * decode(typed(gain)[i]);
  }

  void normalise(int64_t r) {
    decode_row(typed(p.x) + r * width, width, wide, x + r * wide);
    if (p.norm) rms_norm(x + r * wide, p.norm, width, p.norm_eps, h + r * wide);
  }

  // The stream becomes SiLU(conv(stream)).
  void convolve(int64_t r) {
    float* u = stream + r * deep;
    if (p.K > 0) {
      const S *before = typed(p.window) + r * (p.K - 1) * D, *weight = typed(p.conv_weight);
      move_window(r, before);
      for (int64_t d = 0; d < D; ++d)
        u[d] = u[d] * decode(weight[(p.K - 1) * D + d]) + (p.conv_bias ? decode(typed(p.conv_bias)[d]) : 0.0f);
      for (int64_t j = 0; j < p.K - 1; ++j)
        for (int64_t d = 0; d < D; ++d) u[d] += decode(weight[j * D + d]) * decode(before[j * D + d]);
    }
    map_row(u, D, [](Vec<float> v, int64_t) { return silu(v); });
  }

  // The window drops its oldest token and appends this one; without a token it stays unchanged.
  void move_window(int64_t r, const S* before) const {
    const int64_t size = (p.K - 1) * D;
    S* after = static_cast<S*>(p.new_window) + r * size;
    const bool moves = real(r) && size > 0;
    std::copy(before + (moves ? D : 0), before + size, after);
    if (moves) encode_row(stream + r * deep, D, after + size - D);
  }

  // A part of the evidence of low rank, multiplied out to all channels.
  void expand(const kla_matrix& up, int64_t from, float* StepScratch<float>::* to) {
    if (up.weight == nullptr) return;
    const int64_t stride = p.evidence_proj.out;
    Matrix<S>(up).multiply(p.R, evidence + from, stride, p.threads, [&](auto r, auto o, auto count, const float* y) {
      std::copy(y, y + count, token[r].*to + o);
    });
  }

  // The evidence of the token, its query and its step: value, precision, key and query.
  void observe(int64_t r) {
    const float* e = evidence + r * p.evidence_proj.out;
    StepScratch<float>& t = token[r];
    if (p.precision_up.weight == nullptr) std::copy(e + first, e + first + D, t.lam_v);
    const float floor = static_cast<float>(p.floor);
    map_row(t.lam_v, D, [&](Vec<float> raw, int64_t) {
      if (p.link == KLA_LINK_EXP) return exp<float>(raw);
      const Vec<float> positive = softplus(raw) + floor;
      return p.link == KLA_LINK_SOFTPLUS ? positive : 1.0f / positive;
    });
    const float* value = p.project_value ? e : stream + r * deep;
    for (int64_t d = 0; d < D; ++d) t.v[d] = information(value[d], t.lam_v[d]);
    copy_key(e + key, t.k);
    copy_key(e + key + p.N, t.q);
    if (steps())
      map_row(t.dt, D, [&](Vec<float> raw, int64_t d) {
        return softplus(raw + load_lanes(p.raw_dt + d, D - d)) * static_cast<float>(p.step_scale);
      });
    std::fill(t.y, t.y + D, 0.0f);
  }

  void copy_key(const float* from, float* to) const {
    constexpr double kEps = 1e-6;  // of nn/norms.py::l2_norm
    const double scale = p.qk_norm ? 1.0 / std::sqrt(sum_of_squares(from, p.N) + kEps * kEps) : 1.0;
    for (int64_t n = 0; n < p.N; ++n) to[n] = from[n] * static_cast<float>(scale);
  }

  // The belief does not stay in a cache from one token to the next, so threads share the work of reading it, by
  // pieces of channels. Below 4,096 numbers a second thread gains nothing.
  template <bool GAPS>
  void filter() {
    constexpr int64_t kChannels = 128;
    kla_scan_params scan{};
    scan.N = p.N, scan.G = p.G, scan.D = D;
    scan.a_bar = p.a_bar, scan.p_bar = p.p_bar;
    scan.mean_0 = p.mean_0, scan.variance_0 = p.variance_0;
    scan.mean = p.mean, scan.variance = p.variance;
    const int64_t pieces = (D + kChannels - 1) / kChannels;
    auto task = [&](int64_t i, int) {
      const int64_t r = i / pieces, begin = i % pieces * kChannels;
      if (real(r)) step_channels<float, GAPS, false>(scan, r, begin, std::min(D, begin + kChannels), token[r]);
      else if (begin == 0) keep_row<float>(scan, r);
    };
    parallel_for(p.N * D < 4096 ? 1 : p.threads, KLA_POOL_AUTO, p.R * pieces, task);
  }

  // (y + skip u) SiLU(gate)
  void read_out(int64_t r) {
    float *to = latent + r * deep, *open = gate + r * deep, *y = token[r].y;
    if (p.readout_norm) rms_norm(y, p.readout_norm, D, p.readout_eps, to);
    else std::copy(y, y + D, to);
    for (int64_t d = 0; p.skip && d < D; ++d) to[d] += decode(typed(p.skip)[d]) * stream[r * deep + d];
    for (int64_t d = 0; p.gate_bias && d < D; ++d) open[d] += decode(typed(p.gate_bias)[d]);
    map_row(to, D, [&](Vec<float> v, int64_t d) { return v * silu(load(open + d)); });
  }
};

template <class S>
int run_layer_step(const kla_layer_params& p) {
  Arena measure(nullptr);
  LayerStep<S>(measure, p);
  const Block block(measure.used());
  if (!block) return KLA_ERROR_MEMORY;
  Arena arena(block.data());
  LayerStep<S>(arena, p).run();
  return KLA_OK;
}

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
