// The backward pass in waves. dk and dq are sums over channels: every unit of channels writes its own partial
// sums, and a second round adds them in the order of the units, without atomics and always in the same order. To
// keep the partial sums small, and in cache, a call is divided into waves: chunks [c0, c1) of rows [r0, r1).
// Between two waves of a row its adjoint is stored in dmean_0 and dvariance_0.
#ifndef KLA_CPU_WAVES_H
#define KLA_CPU_WAVES_H

#include "plan.h"

namespace kla {
namespace KLA_ISA_NAMESPACE {

struct Wave {
  int64_t r0, r1, c0, c1;

  // Tokens [begin, end) of a row that belong to the wave, relative to the row.
  int64_t begin() const { return c0 * KLA_CHUNK; }
  int64_t end(const Row& row) const { return std::min(row.length, c1 * KLA_CHUNK); }
};

class Waves {
 public:
  Waves(const Scan& p, const Groups& groups) : p_(p) {
    constexpr int64_t kPartials = 1 << 20;  // numbers for dk, and the same for dq: 8 MB in float32, which L3 holds
    constexpr int64_t kTasks = 128;         // occupies large machines without using much memory
    budget_ = std::max<int64_t>(kPartials / (groups.units * p.N), 4 * KLA_CHUNK);
    max_rows_ = std::min(p.R, std::max<int64_t>(1, kTasks / groups.units));
  }

  int64_t max_rows() const { return max_rows_; }
  int64_t max_tokens() const {
    const int64_t all = p_.B * p_.T + p_.R * KLA_CHUNK;
    return std::min(all, std::max(budget_, max_rows_ * 4 * KLA_CHUNK));
  }

  // Rows [r0, end) share their waves. Batch rows have equal lengths and are split in time together; documents are
  // taken whole, except that one that is too long is split by itself.
  int64_t rows_end(int64_t r0) const {
    if (!p_.cu_seqlens) return std::min(p_.R, r0 + max_rows_);
    int64_t r1 = r0 + 1;
    for (int64_t tokens = row_at(p_, r0).length; r1 < std::min(p_.R, r0 + max_rows_); ++r1) {
      tokens += row_at(p_, r1).length;
      if (tokens > budget_) break;
    }
    return r1;
  }

  int64_t chunks(int64_t r0, int64_t r1) const {
    int64_t most = 0;
    for (int64_t r = r0; r < r1; ++r) most = std::max(most, row_at(p_, r).chunks());
    return most;
  }

  int64_t slice(int64_t r0, int64_t r1) const {
    if (p_.cu_seqlens && r1 - r0 > 1) return std::max<int64_t>(1, chunks(r0, r1));
    return std::max<int64_t>(4, budget_ / ((r1 - r0) * KLA_CHUNK));
  }

  // Where the partial sums of row r begin in a wave, in tokens.
  int64_t offset(const Wave& wave, int64_t r) const {
    if (p_.cu_seqlens) return row_at(p_, r).t0 - row_at(p_, wave.r0).t0;
    return (r - wave.r0) * (wave.c1 - wave.c0) * KLA_CHUNK;
  }

 private:
  const Scan& p_;
  int64_t budget_, max_rows_;
};

}  // namespace KLA_ISA_NAMESPACE
}  // namespace kla
#endif
