// A step program: the operations of one engine step over row buffers, run in one call.
//
// A buffer has one row per token of the step, or per output (a token whose logits are wanted).
// Operations run in order and name buffers by number; what one of them computes for a row depends
// on that row only. Memory grows to the largest step so far and is kept.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "executor.h"
#include "row_ops.h"
#include "scratch.h"

namespace freetoken::exec {

using BufferIndex = std::size_t;

struct BufferSpec {
  std::size_t row_bytes;
  bool per_output;  // one row per output instead of one per token
};

// out[token] = table[token_ids[token]]
struct EmbedOp {
  const std::byte* table;  // bf16, row-major, or rows16
  bool rows16;
  std::size_t vocab_size, features;
  BufferIndex out;
};

// residual += delta
struct AddOp {
  BufferIndex residual, delta;
  std::size_t size;
};

// residual += delta where there is one; out = norm(residual) * weight, bf16
struct AddRmsNormOp {
  BufferIndex residual;
  bool has_delta;
  BufferIndex delta;
  const float* weight;
  float eps;
  std::size_t size;
  BufferIndex out;
};

struct LinearProduct {
  const std::byte* w;
  WeightFormat format;
  const float* bias;  // or null
  std::size_t out_features;
  BufferIndex out;
};

struct LinearOp {
  BufferIndex x;
  std::size_t in_features;
  std::vector<LinearProduct> products;
  bool fast;
};

// Norm of each head in place, rounded to bf16.
struct HeadNormOp {
  BufferIndex x;
  std::size_t heads, head_size;
  const float* weight;
  float eps;
};

// Pair (i, i + head_size / 2) of each head turned by the token's angle, in place.
struct RotateOp {
  BufferIndex x;
  std::size_t heads, head_size;
  std::size_t table;  // index into StepCall::rotations
};

struct AttendOp {
  std::size_t layer_index;  // into KvPages::layers
  BufferIndex q, k, v, out;
  std::size_t q_heads, kv_heads, head_size;
  float scale;
};

// Router logits: fp32 weights and sums, see pack_router.
struct RouterOp {
  BufferIndex x;
  std::size_t hidden, experts_count;
  std::vector<float> packed;
  BufferIndex out;
};

// Experts and weights from router logits, best first, equal scores by lower index.
struct RouteOp {
  BufferIndex logits;
  Router router;
  BufferIndex ids, weights;
};

struct ExpertsOp {
  std::size_t moe_layer_index;
  BufferIndex x, ids, weights;
  std::size_t top_k, hidden;
  BufferIndex out;
};

// out = silu(gate) * up, bf16
struct GluOp {
  BufferIndex gate, up;
  std::size_t size;
  BufferIndex out;
};

// The rows of x that outputs name.
struct SelectRowsOp {
  BufferIndex x;
  std::size_t size;
  BufferIndex out;
};

// A token of each row of logits, as StepCall::sampling wants it: see sample_row.
struct SampleOp {
  BufferIndex logits;
  std::size_t vocab_size;
  BufferIndex ids, peaks;
};

using Op = std::variant<EmbedOp, AddOp, AddRmsNormOp, LinearOp, HeadNormOp, RotateOp, AttendOp,
                        RouterOp, RouteOp, ExpertsOp, GluOp, SelectRowsOp, SampleOp>;

// Whoever runs the routed experts of a step, wherever their weights are.
struct RoutedTokens {
  std::size_t moe_layer_index;
  const Bf16* x;            // [tokens][hidden]
  const std::int32_t* ids;  // [tokens][top_k]
  const float* weights;     // [tokens][top_k]
  float* out;               // [tokens][hidden]: sums in routed order
  std::size_t tokens, top_k, hidden;
};

class ExpertDispatch {
 public:
  virtual ~ExpertDispatch() = default;
  virtual void dispatch(Executor& executor, const RoutedTokens& routed) = 0;
};

// Every expert executed in place: records in memory, one layer after another.
struct ExpertBank {
  const std::byte* records;
  std::size_t record_bytes, layers_count, experts_per_layer_count;
  std::size_t hidden, intermediate;
  WeightFormat format;
  bool has_bias;
  GluSpec glu;
  bool fast;
};

class BankExperts final : public ExpertDispatch {
 public:
  explicit BankExperts(const ExpertBank& bank) : bank_(bank) {}
  void dispatch(Executor& executor, const RoutedTokens& routed) override;
  const ExpertBank& bank() const { return bank_; }
  // (token, expert) pairs so far; from any thread.
  std::uint64_t executions_count() const { return executions_count_.load(); }

 private:
  ExpertBank bank_;
  Scratch partial_;  // [tokens][top_k][hidden]
  std::atomic<std::uint64_t> executions_count_{0};
};

// cos and sin of each position's angles: [positions_count][2][head_size / 2].
struct Rotations {
  const float* rows;
  std::size_t positions_count;
};

// The pages of every layer: [pages_count][kv_heads][page_tokens][head_size] each.
struct KvPages {
  struct Layer {
    Bf16* keys;
    Bf16* values;
  };
  std::vector<Layer> layers;
  std::size_t pages_count, kv_heads, page_tokens, head_size;
};

struct StepCall {
  const std::int64_t* token_ids;  // [tokens]
  std::size_t tokens;
  const std::int64_t* outputs;  // [outputs_count] which tokens
  std::size_t outputs_count;
  const SamplingParams* sampling;      // [outputs_count], or null where no SampleOp is run
  const std::int32_t* page_table;      // [sequences][max_pages]
  const std::int32_t* sequence_index;  // [tokens]
  const std::int32_t* positions;       // [tokens]
  std::size_t sequences, max_pages;
  const KvPages* kv;
  std::vector<Rotations> rotations;  // by RotateOp::table
};

// Wrong arguments throw std::invalid_argument. One run at a time.
class Program {
 public:
  // `experts` may be null for a program without an ExpertsOp; it must outlive the program.
  Program(std::vector<BufferSpec> buffers, ExpertDispatch* experts);

  void add(Op op);
  std::size_t ops_count() const { return ops_.size(); }

  // Makes room for the step; addresses of buffers may change here and nowhere else.
  void prepare(const StepCall& step);
  // Runs ops [first, last) of the step that prepare() was called with.
  void run(Executor& executor, const StepCall& step, std::size_t first, std::size_t last);

  std::byte* buffer(BufferIndex index) const;
  // What all buffers take now.
  std::size_t arena_bytes() const { return arena_.capacity_bytes(); }
  // Ops finished since the program was made; from any thread, also during a run.
  std::uint64_t finished_ops_count() const { return finished_.load(std::memory_order_relaxed); }

 private:
  struct Running {
    Executor& executor;
    const StepCall& step;
  };

  template <class T>
  T* at(BufferIndex index) const {
    return reinterpret_cast<T*>(buffer(index));
  }
  std::size_t rows_of(BufferIndex index, const StepCall& step) const;
  void require_buffer(BufferIndex index, std::size_t row_bytes, std::string_view name) const;

  void check(const EmbedOp& op) const;
  void check(const AddOp& op) const;
  void check(const AddRmsNormOp& op) const;
  void check(const LinearOp& op) const;
  void check(const HeadNormOp& op) const;
  void check(const RotateOp& op) const;
  void check(const AttendOp& op) const;
  void check(const RouterOp& op) const;
  void check(const RouteOp& op) const;
  void check(const ExpertsOp& op) const;
  void check(const GluOp& op) const;
  void check(const SelectRowsOp& op) const;
  void check(const SampleOp& op) const;

  void execute(const Running& now, const EmbedOp& op);
  void execute(const Running& now, const AddOp& op);
  void execute(const Running& now, const AddRmsNormOp& op);
  void execute(const Running& now, const LinearOp& op);
  void execute(const Running& now, const HeadNormOp& op);
  void execute(const Running& now, const RotateOp& op);
  void execute(const Running& now, const AttendOp& op);
  void execute(const Running& now, const RouterOp& op);
  void execute(const Running& now, const RouteOp& op);
  void execute(const Running& now, const ExpertsOp& op);
  void execute(const Running& now, const GluOp& op);
  void execute(const Running& now, const SelectRowsOp& op);
  void execute(const Running& now, const SampleOp& op);

  std::vector<BufferSpec> buffers_;
  ExpertDispatch* experts_;
  std::vector<Op> ops_;
  std::vector<std::size_t> offsets_;  // of the buffers, in arena_
  std::size_t tokens_capacity_ = 0;
  std::size_t outputs_capacity_ = 0;
  std::byte* base_ = nullptr;
  Scratch arena_;
  std::vector<LinearOutput> outputs_;  // of the linear layer at hand
  Scratch padded_;                     // router logits in whole blocks of experts
  std::atomic<std::uint64_t> finished_{0};
};

}  // namespace freetoken::exec
