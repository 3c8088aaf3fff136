// The CPU executor: matrix products, experts, norms and attention over packed weights.
//
// Numerics: an output element depends on its row and its token only. Every product has one
// accumulator per (row, token) that takes the columns in order, whatever the number of tokens,
// threads or the blocking, so results are equal bit for bit.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention_plan.h"
#include "exclusive.h"
#include "kernels.h"
#include "layout.h"
#include "panels.h"
#include "sampling.h"
#include "scratch.h"
#include "tiles.h"
#include "worker_pool.h"

namespace freetoken::exec {

// One matrix of a linear layer: y[token][row] = x[token] . w[row] + bias[row]
struct LinearOutput {
  const std::byte* w;  // rows16, aligned to 64 bytes
  WeightFormat format;
  const float* bias;  // [out_features] or null
  float* y;           // [tokens][out_features]
  std::size_t out_features;
};

// Several matrices over the same activations, which are arranged once.
struct LinearCall {
  const Bf16* x;  // [tokens][in_features]
  std::size_t tokens, in_features;
  std::span<const LinearOutput> outputs;
  bool fast = false;  // int8 activations where the format has them
};

// y[token][k] = weights[token][k] * down(act(gate x) * up x) of expert expert_ids[token][k]; an
// id of -1 gives zeros, or leaves y as it is where others compute it.
struct ExpertsCall {
  const Bf16* x;                   // [tokens][hidden]
  const std::int32_t* expert_ids;  // [tokens][top_k], -1 or an index of a record
  const float* weights;            // [tokens][top_k]
  float* y;                        // [tokens][top_k][hidden]
  std::size_t tokens, top_k, hidden, intermediate;
  const std::byte* bank;  // experts_count records, aligned to 64 bytes
  std::size_t record_bytes, experts_count;
  WeightFormat format;
  bool has_bias = false;
  GluSpec glu;
  bool fast = false;
  // Where each expert's record is, if they do not lie one after another in `bank`: experts_count
  // addresses, of which only those of the experts in expert_ids count.
  const std::byte* const* records = nullptr;
  bool keep_absent = false;  // leave the y of ids of -1 as it is

  const std::byte* record(std::size_t expert) const {
    return records != nullptr ? records[expert] : bank + expert * record_bytes;
  }
};

struct StoreKvCall {
  const float* k;  // [tokens][kv_heads][head_size]
  const float* v;
  Bf16* k_pages;  // [pages][kv_heads][page_tokens][head_size]
  Bf16* v_pages;
  const std::int32_t* page_table;      // [sequences][max_pages]
  const std::int32_t* sequence_index;  // [tokens]
  const std::int32_t* positions;       // [tokens]
  std::size_t tokens, kv_heads, head_size, page_tokens, max_pages;
  std::size_t sequences, pages;  // bounds to check against; 0 = unknown
};

struct AttentionCall {
  const float* q;  // [tokens][q_heads][head_size]
  const Bf16* k_pages;
  const Bf16* v_pages;
  const std::int32_t* page_table;
  const std::int32_t* sequence_index;
  const std::int32_t* positions;
  Bf16* out;  // [tokens][q_heads * head_size]
  std::size_t tokens, q_heads, kv_heads, head_size, page_tokens, max_pages;
  std::size_t sequences, pages;
  float scale;
};

// Wrong arguments throw std::invalid_argument; nothing has been written then. Calls are
// synchronous and must come from one thread at a time (a second one gets std::logic_error).
class Executor {
 public:
  Executor(std::vector<int> cpus, std::chrono::nanoseconds spin, std::string_view isa);
  // With kernels that no name stands for: tests.
  Executor(std::vector<int> cpus, std::chrono::nanoseconds spin, const Kernels* kernels);

  const char* isa() const { return kernels_->isa; }
  int threads_count() const { return pool_.workers_count(); }
  // Whether `fast` changes products of this format here.
  bool has_fast(const WeightFormat& format) const;

  void linear(const LinearCall& call);
  void experts(const ExpertsCall& call);
  // out[token] = sum over k, in order, of y[token][k]
  void merge(const float* y, float* out, std::size_t tokens, std::size_t top_k, std::size_t hidden);
  void rms_norm(const float* x, const float* weight, Bf16* y, std::size_t rows, std::size_t size,
                float eps);
  // vocab_size 0 = unknown: then only negative ids are refused.
  void embed_rows16(const std::byte* w, const std::int64_t* ids, float* out, std::size_t tokens,
                    std::size_t features, std::size_t vocab_size);
  void store_kv(const StoreKvCall& call);
  void paged_attention(const AttentionCall& call);
  void sample(const SampleRowsCall& call);
  // body(row) for every row of a row-wise operation, spread over the workers where that pays.
  template <class Body>
  void for_rows(std::size_t rows, std::size_t row_elements, const Body& body) {
    const Exclusive exclusive(busy_);
    const std::size_t step = std::max<std::size_t>(1, kRowsTileElements / row_elements);
    pool_.run(ceil_div(rows, step), [&](std::uint32_t tile, int) noexcept {
      const std::size_t begin = tile * step;
      for (std::size_t row = begin; row < std::min(rows, begin + step); ++row) body(row);
    });
  }
  // body(tile) for every tile, spread over the workers.
  template <class Body>
  void for_tiles(std::size_t tiles, const Body& body) {
    const Exclusive exclusive(busy_);
    pool_.run(tiles, [&](std::uint32_t tile, int) noexcept { body(tile); });
  }
  const Kernels& kernels() const { return *kernels_; }
  // Reads the bytes once with all workers, as the kernels do; returns a checksum.
  std::uint64_t stream_read(const std::byte* data, std::size_t length_bytes);

 private:
  // Rows that one worker takes at a time in row-wise operations, by elements.
  static constexpr std::size_t kRowsTileElements = std::size_t{32} << 10;

  const ProductKernels& products(const WeightFormat& format, bool fast) const;
  float* accumulators(int worker);
  void dot_tile(const ProductKernels& kernels, const WeightFormat& format, const ProductTile& tile,
                const std::byte* weights, int blocks, std::size_t columns, Panels& panels,
                int worker);
  template <class Store>
  void for_panels(const ProductTile& tile, int blocks, int worker, const Store& store);
  void linear_run(const LinearCall& call, std::span<const LinearOutput> outputs);
  void run_gate_up(const ExpertsCall& call, const ExpertLayout& layout);
  void run_down(const ExpertsCall& call, const ExpertLayout& layout);
  float* attention_workspace(int worker);
  void attend_pairs(const AttentionCall& call);
  void attend_parts(const AttentionCall& call);

  std::atomic<bool> busy_{false};
  WorkerPool pool_;
  const Kernels* kernels_;
  // State of the call in progress, kept for its memory.
  TokenGroups groups_;
  ProductTiles tiles_;
  Panels panels_;         // activations
  Panels middle_;         // activations between the two products of an expert
  Scratch accumulators_;  // per worker
  AttentionPlan attention_;
  std::vector<SamplingScratch> sampling_;  // per worker
};

}  // namespace freetoken::exec
