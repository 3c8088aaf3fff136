#include "program.h"

#include <algorithm>
#include <string>
#include <utility>

#include "layout.h"
#include "validate.h"

namespace freetoken::exec {
namespace {

constexpr std::size_t kF32 = sizeof(float);
constexpr std::size_t kBf16 = sizeof(Bf16);

}  // namespace

Program::Program(std::vector<BufferSpec> buffers, ExpertDispatch* experts)
    : buffers_(std::move(buffers)), experts_(experts), offsets_(buffers_.size()) {
  for (const BufferSpec& buffer : buffers_) {
    require(buffer.row_bytes > 0 && buffer.row_bytes < (std::size_t{1} << 32),
            "a buffer of a step program needs columns");
  }
}

void Program::add(Op op) {
  std::visit([this](const auto& one) { check(one); }, op);
  ops_.push_back(std::move(op));
}

void Program::prepare(const StepCall& step) {
  require(step.tokens > 0 && step.tokens < (std::size_t{1} << 24), "a step needs tokens");
  require(step.outputs_count <= step.tokens, "more outputs than tokens");
  require(step.kv != nullptr, "a step needs keys and values");
  require(step.token_ids != nullptr && step.page_table != nullptr &&
              step.sequence_index != nullptr && step.positions != nullptr &&
              (step.outputs_count == 0 || step.outputs != nullptr),
          "step: null address of an input");
  for (std::size_t i = 0; i < step.outputs_count; ++i) {
    require_index(step.outputs[i], step.tokens, "output");
  }
  if (base_ != nullptr && step.tokens <= tokens_capacity_ &&
      step.outputs_count <= outputs_capacity_) {
    return;
  }
  const std::size_t tokens = std::max(tokens_capacity_, step.tokens);
  const std::size_t outputs = std::max(outputs_capacity_, step.outputs_count);
  std::size_t end = 0;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    offsets_[i] = end;
    const std::size_t rows = buffers_[i].per_output ? outputs : tokens;
    end += round_up(rows * buffers_[i].row_bytes, Scratch::kAlignment);
  }
  base_ = nullptr;
  base_ = arena_.get<std::byte>(std::max<std::size_t>(end, 1));
  tokens_capacity_ = tokens;
  outputs_capacity_ = outputs;
}

void Program::run(Executor& executor, const StepCall& step, std::size_t first, std::size_t last) {
  require(first <= last && last <= ops_.size(), "no such ops");
  require(base_ != nullptr && step.tokens <= tokens_capacity_ &&
              step.outputs_count <= outputs_capacity_,
          "the step was not prepared");
  const Running now{executor, step};
  for (std::size_t i = first; i < last; ++i) {
    std::visit([&](const auto& op) { execute(now, op); }, ops_[i]);
    finished_.fetch_add(1, std::memory_order_relaxed);
  }
}

std::byte* Program::buffer(BufferIndex index) const {
  require(base_ != nullptr && index < buffers_.size(), "no such buffer, or no step yet");
  return base_ + offsets_[index];
}

std::size_t Program::rows_of(BufferIndex index, const StepCall& step) const {
  return buffers_[index].per_output ? step.outputs_count : step.tokens;
}

void Program::require_buffer(BufferIndex index, std::size_t row_bytes,
                             std::string_view name) const {
  require(index < buffers_.size(), "a step program names a buffer that does not exist");
  if (buffers_[index].row_bytes != row_bytes) {
    refuse("buffer " + std::to_string(index) + " (" + std::string(name) + ") has rows of " +
           std::to_string(buffers_[index].row_bytes) + " bytes, the op needs " +
           std::to_string(row_bytes));
  }
}

void Program::check(const EmbedOp& op) const {
  require(op.table != nullptr && op.vocab_size > 0, "embed: no table");
  require_buffer(op.out, op.features * kF32, "embed: out");
}

void Program::check(const AddOp& op) const {
  require_buffer(op.residual, op.size * kF32, "add: residual");
  require_buffer(op.delta, op.size * kF32, "add: delta");
}

void Program::check(const AddRmsNormOp& op) const {
  require(op.weight != nullptr && op.size > 0 && op.eps >= 0, "norm: no weight or eps below zero");
  require_buffer(op.residual, op.size * kF32, "norm: residual");
  if (op.has_delta) require_buffer(op.delta, op.size * kF32, "norm: delta");
  require_buffer(op.out, op.size * kBf16, "norm: out");
}

void Program::check(const LinearOp& op) const {
  require(!op.products.empty(), "linear: no matrix");
  require_buffer(op.x, op.in_features * kBf16, "linear: x");
  for (const LinearProduct& product : op.products) {
    require_aligned(product.w, "linear: w");
    require_buffer(product.out, product.out_features * kF32, "linear: out");
  }
}

void Program::check(const HeadNormOp& op) const {
  require(op.weight != nullptr && op.head_size > 0 && op.eps >= 0, "head norm: no weight");
  require_buffer(op.x, op.heads * op.head_size * kF32, "head norm: x");
}

void Program::check(const RotateOp& op) const {
  require(op.head_size % 2 == 0, "rotate: heads of an odd size");
  require_buffer(op.x, op.heads * op.head_size * kF32, "rotate: x");
}

void Program::check(const AttendOp& op) const {
  require_buffer(op.q, op.q_heads * op.head_size * kF32, "attend: q");
  require_buffer(op.k, op.kv_heads * op.head_size * kF32, "attend: k");
  require_buffer(op.v, op.kv_heads * op.head_size * kF32, "attend: v");
  require_buffer(op.out, op.q_heads * op.head_size * kBf16, "attend: out");
}

void Program::check(const RouterOp& op) const {
  require(op.packed.size() == packed_router_floats(op.experts_count, op.hidden),
          "router: packed weights of another size");
  require_buffer(op.x, op.hidden * kBf16, "router: x");
  require_buffer(op.out, op.experts_count * kF32, "router: out");
}

void Program::check(const RouteOp& op) const {
  validate(op.router);
  require_buffer(op.logits, op.router.experts * kF32, "route: logits");
  require_buffer(op.ids, op.router.top_k * sizeof(std::int32_t), "route: ids");
  require_buffer(op.weights, op.router.top_k * kF32, "route: weights");
}

void Program::check(const ExpertsOp& op) const {
  require(experts_ != nullptr, "experts: nobody runs them");
  require_buffer(op.x, op.hidden * kBf16, "experts: x");
  require_buffer(op.ids, op.top_k * sizeof(std::int32_t), "experts: ids");
  require_buffer(op.weights, op.top_k * kF32, "experts: weights");
  require_buffer(op.out, op.hidden * kF32, "experts: out");
}

void Program::check(const GluOp& op) const {
  require_buffer(op.gate, op.size * kF32, "glu: gate");
  require_buffer(op.up, op.size * kF32, "glu: up");
  require_buffer(op.out, op.size * kBf16, "glu: out");
}

void Program::check(const SelectRowsOp& op) const {
  require_buffer(op.x, op.size * kF32, "select: x");
  require_buffer(op.out, op.size * kF32, "select: out");
}

void Program::check(const SampleOp& op) const {
  require_buffer(op.logits, op.vocab_size * kF32, "sample: logits");
  require_buffer(op.ids, sizeof(std::int32_t), "sample: ids");
  require_buffer(op.peaks, kF32, "sample: peaks");
  require(buffers_[op.logits].per_output && buffers_[op.ids].per_output &&
              buffers_[op.peaks].per_output,
          "sample: rows of tokens");
}

}  // namespace freetoken::exec
