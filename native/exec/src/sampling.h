// Choosing a token from one row of logits.
//
// The token depends on the row, the parameters and the draw index only: not on other rows, threads
// or the instruction set (the code is compiled once, without contraction), so a request gets the
// same tokens alone, in any batch, and after a preemption that computed its prefix again.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "worker_pool.h"

namespace freetoken::exec {

// How one row is sampled, as callers lay it out in memory. Filters apply in the order of the
// fields; defaults change nothing.
struct SamplingParams {
  double temperature = 1.0;  // 0 or less: greedy, the filters do not matter then
  std::int64_t top_k = 0;    // 0: off. Keeps every token that equals the k-th best.
  double top_p = 1.0;        // 1: off. The smallest set of best tokens (the lower id first) that
                             // reaches this share of the sum.
  double min_p = 0.0;        // 0: off. At least this share of the best token's probability.
  std::uint64_t seed = 0;    // the key of Philox
  std::uint64_t draw_index = 0;  // its counter
};
static_assert(sizeof(SamplingParams) == 6 * 8);

struct SampleResult {
  std::int32_t token;  // -1: the row has NaN or +inf, or nothing above -inf
  float peak;          // the largest logit, NaN if any is NaN
};

// Working memory of one caller at a time.
class SamplingScratch {
 public:
  // Makes room for rows of `vocab` logits; afterwards sampling such rows allocates nothing.
  void reserve(std::size_t vocab);

 private:
  friend class RowSampler;
  std::vector<float> weights_;
  std::vector<std::uint32_t> ids_;
  std::vector<float> maxima_;
  std::vector<double> sums_;
};

// logits: [vocab], 0 < vocab < 2^31, -inf for a token that must not be drawn. No parameter is NaN.
SampleResult sample_row(const float* logits, std::size_t vocab, const SamplingParams& params,
                        SamplingScratch& scratch);

struct SampleRowsCall {
  const float* logits;           // [rows][vocab]
  const SamplingParams* params;  // [rows]
  std::int32_t* token_ids;       // [rows], as of SampleResult
  float* peaks;                  // [rows]
  std::size_t rows, vocab;
};

// Every row by sample_row, spread over the pool's workers. scratch: one per worker.
void sample_rows(WorkerPool& pool, const SampleRowsCall& call, std::span<SamplingScratch> scratch);

}  // namespace freetoken::exec
