// What each op of a step program computes.
#include <algorithm>
#include <cstring>

#include "layout.h"
#include "program.h"
#include "validate.h"

namespace freetoken::exec {
namespace {

// Tokens of one tile of router logits: a block of experts stays in the cache for all of them.
constexpr std::size_t kRouterTokens = 128;
// With fewer tokens than this the kernel takes so many blocks of experts side by side.
constexpr std::size_t kRouterFewTokens = 4;
constexpr std::size_t kRouterBlocks = 4;

}  // namespace

void BankExperts::dispatch(Executor& executor, const RoutedTokens& routed) {
  require(routed.moe_layer_index < bank_.layers_count, "experts: no such MoE layer");
  require(routed.hidden == bank_.hidden, "experts: rows of another size than the bank's");
  auto* partial = partial_.get<float>(routed.tokens * routed.top_k * routed.hidden);
  const std::size_t layer_bytes = bank_.experts_per_layer_count * bank_.record_bytes;
  executor.experts({.x = routed.x,
                    .expert_ids = routed.ids,
                    .weights = routed.weights,
                    .y = partial,
                    .tokens = routed.tokens,
                    .top_k = routed.top_k,
                    .hidden = bank_.hidden,
                    .intermediate = bank_.intermediate,
                    .bank = bank_.records + routed.moe_layer_index * layer_bytes,
                    .record_bytes = bank_.record_bytes,
                    .experts_count = bank_.experts_per_layer_count,
                    .format = bank_.format,
                    .has_bias = bank_.has_bias,
                    .glu = bank_.glu,
                    .fast = bank_.fast});
  executor.merge(partial, routed.out, routed.tokens, routed.top_k, routed.hidden);
  executions_count_.fetch_add(routed.tokens * routed.top_k);
}

void Program::execute(const Running& now, const EmbedOp& op) {
  const StepCall& step = now.step;
  auto* out = at<float>(op.out);
  if (op.rows16) {
    now.executor.embed_rows16(op.table, step.token_ids, out, step.tokens, op.features,
                              op.vocab_size);
    return;
  }
  for (std::size_t token = 0; token < step.tokens; ++token) {
    require_index(step.token_ids[token], op.vocab_size, "token id");
  }
  const auto* table = reinterpret_cast<const Bf16*>(op.table);
  now.executor.for_rows(step.tokens, op.features, [&](std::size_t token) noexcept {
    const Bf16* row = table + static_cast<std::size_t>(step.token_ids[token]) * op.features;
    std::transform(row, row + op.features, out + token * op.features, bf16_to_float);
  });
}

void Program::execute(const Running& now, const AddOp& op) {
  auto* residual = at<float>(op.residual);
  const auto* delta = at<const float>(op.delta);
  now.executor.for_rows(rows_of(op.residual, now.step), op.size, [&](std::size_t row) noexcept {
    add_rows(residual, delta, op.size, row, row + 1);
  });
}

void Program::execute(const Running& now, const AddRmsNormOp& op) {
  auto* residual = at<float>(op.residual);
  const auto* delta = op.has_delta ? at<const float>(op.delta) : nullptr;
  auto* out = at<Bf16>(op.out);
  const auto norm = now.executor.kernels().rms_norm;
  now.executor.for_rows(rows_of(op.residual, now.step), op.size, [&](std::size_t row) noexcept {
    float* x = residual + row * op.size;
    if (delta != nullptr) add_rows(residual, delta, op.size, row, row + 1);
    norm(x, op.weight, op.size, op.eps, out + row * op.size);
  });
}

void Program::execute(const Running& now, const LinearOp& op) {
  const std::size_t rows = rows_of(op.x, now.step);
  if (rows == 0) return;
  outputs_.clear();
  for (const LinearProduct& product : op.products) {
    outputs_.push_back({.w = product.w,
                        .format = product.format,
                        .bias = product.bias,
                        .y = at<float>(product.out),
                        .out_features = product.out_features});
  }
  now.executor.linear({.x = at<const Bf16>(op.x),
                       .tokens = rows,
                       .in_features = op.in_features,
                       .outputs = outputs_,
                       .fast = op.fast});
}

void Program::execute(const Running& now, const HeadNormOp& op) {
  const std::size_t width = op.heads * op.head_size;
  const HeadNormCall call{.x = at<float>(op.x),
                          .row_stride = width,
                          .heads = op.heads,
                          .head_size = op.head_size,
                          .weight = op.weight,
                          .eps = op.eps};
  const RowKernels& kernels = now.executor.kernels().rows;
  now.executor.for_rows(rows_of(op.x, now.step), width, [&](std::size_t row) noexcept {
    head_norm_rows(kernels, call, row, row + 1);
  });
}

void Program::execute(const Running& now, const RotateOp& op) {
  const StepCall& step = now.step;
  require(op.table < step.rotations.size(), "rotate: no such table");
  const Rotations& table = step.rotations[op.table];
  for (std::size_t token = 0; token < step.tokens; ++token) {
    require_index(step.positions[token], table.positions_count, "position in the rotations");
  }
  const std::size_t width = op.heads * op.head_size;
  const RopeCall call{.x = at<float>(op.x),
                      .row_stride = width,
                      .heads = op.heads,
                      .head_size = op.head_size,
                      .rotary_size = op.head_size,
                      .rotations = table.rows,
                      .positions = step.positions};
  now.executor.for_rows(step.tokens, width,
                        [&](std::size_t token) noexcept { rope_rows(call, token, token + 1); });
}

void Program::execute(const Running& now, const AttendOp& op) {
  const StepCall& step = now.step;
  const KvPages& kv = *step.kv;
  require(op.layer_index < kv.layers.size(), "attend: no pages of this layer");
  require(op.kv_heads == kv.kv_heads && op.head_size == kv.head_size,
          "attend: the pages are of other heads");
  const KvPages::Layer& pages = kv.layers[op.layer_index];
  now.executor.store_kv({.k = at<const float>(op.k),
                         .v = at<const float>(op.v),
                         .k_pages = pages.keys,
                         .v_pages = pages.values,
                         .page_table = step.page_table,
                         .sequence_index = step.sequence_index,
                         .positions = step.positions,
                         .tokens = step.tokens,
                         .kv_heads = op.kv_heads,
                         .head_size = op.head_size,
                         .page_tokens = kv.page_tokens,
                         .max_pages = step.max_pages,
                         .sequences = step.sequences,
                         .pages = kv.pages_count});
  now.executor.paged_attention({.q = at<const float>(op.q),
                                .k_pages = pages.keys,
                                .v_pages = pages.values,
                                .page_table = step.page_table,
                                .sequence_index = step.sequence_index,
                                .positions = step.positions,
                                .out = at<Bf16>(op.out),
                                .tokens = step.tokens,
                                .q_heads = op.q_heads,
                                .kv_heads = op.kv_heads,
                                .head_size = op.head_size,
                                .page_tokens = kv.page_tokens,
                                .max_pages = step.max_pages,
                                .sequences = step.sequences,
                                .pages = kv.pages_count,
                                .scale = op.scale});
}

void Program::execute(const Running& now, const RouterOp& op) {
  const std::size_t rows = rows_of(op.x, now.step);
  const std::size_t blocks = ceil_div(op.experts_count, kExpertsPerBlock);
  const std::size_t stride = blocks * kExpertsPerBlock;
  auto* padded = padded_.get<float>(rows * stride);
  const RowKernels& kernels = now.executor.kernels().rows;
  Router router;
  router.experts = op.experts_count;
  const RouteCall call{.router = &router,
                       .packed = op.packed.data(),
                       .x = at<const Bf16>(op.x),
                       .hidden = op.hidden,
                       .logits = padded,
                       .expert_ids = nullptr,
                       .weights = nullptr};
  const std::size_t step = rows < kRouterFewTokens ? kRouterBlocks : 1;
  const std::size_t columns = ceil_div(blocks, step);
  const std::size_t tiles = columns * ceil_div(rows, kRouterTokens);
  now.executor.for_tiles(tiles, [&](std::size_t tile) noexcept {
    const std::size_t block = tile % columns * step;
    const std::size_t row = tile / columns * kRouterTokens;
    router_logits_rows(kernels, call, block, std::min(blocks, block + step), row,
                       std::min(rows, row + kRouterTokens));
  });
  auto* logits = at<float>(op.out);
  for (std::size_t row = 0; row < rows; ++row) {
    std::copy_n(padded + row * stride, op.experts_count, logits + row * op.experts_count);
  }
}

void Program::execute(const Running& now, const RouteOp& op) {
  const std::size_t rows = rows_of(op.logits, now.step);
  const std::size_t experts = op.router.experts;
  const std::size_t stride = round_up(experts, kExpertsPerBlock);
  auto* padded = padded_.get<float>(rows * stride);
  const auto* logits = at<const float>(op.logits);
  const RowKernels& kernels = now.executor.kernels().rows;
  const RouteCall call{.router = &op.router,
                       .packed = nullptr,
                       .x = nullptr,
                       .hidden = 0,
                       .logits = padded,
                       .expert_ids = at<std::int32_t>(op.ids),
                       .weights = at<float>(op.weights)};
  now.executor.for_rows(rows, stride * op.router.top_k, [&](std::size_t row) noexcept {
    std::copy_n(logits + row * experts, experts, padded + row * stride);
    select_rows(kernels, call, row, row + 1);
  });
}

void Program::execute(const Running& now, const ExpertsOp& op) {
  experts_->dispatch(now.executor, {.moe_layer_index = op.moe_layer_index,
                                    .x = at<const Bf16>(op.x),
                                    .ids = at<const std::int32_t>(op.ids),
                                    .weights = at<const float>(op.weights),
                                    .out = at<float>(op.out),
                                    .tokens = rows_of(op.x, now.step),
                                    .top_k = op.top_k,
                                    .hidden = op.hidden});
}

void Program::execute(const Running& now, const GluOp& op) {
  const auto* gate = at<const float>(op.gate);
  const auto* up = at<const float>(op.up);
  auto* out = at<Bf16>(op.out);
  const auto product = now.executor.kernels().silu_product;
  now.executor.for_rows(rows_of(op.out, now.step), op.size, [&](std::size_t row) noexcept {
    product(gate + row * op.size, up + row * op.size, op.size, out + row * op.size);
  });
}

void Program::execute(const Running& now, const SelectRowsOp& op) {
  const auto* x = at<const float>(op.x);
  auto* out = at<float>(op.out);
  for (std::size_t row = 0; row < now.step.outputs_count; ++row) {
    const auto token = static_cast<std::size_t>(now.step.outputs[row]);
    std::copy_n(x + token * op.size, op.size, out + row * op.size);
  }
}

void Program::execute(const Running& now, const SampleOp& op) {
  now.executor.sample({.logits = at<const float>(op.logits),
                       .params = now.step.sampling,
                       .token_ids = at<std::int32_t>(op.ids),
                       .peaks = at<float>(op.peaks),
                       .rows = now.step.outputs_count,
                       .vocab = op.vocab_size});
}

}  // namespace freetoken::exec
