// Routed SwiGLU experts: two products per expert over the tokens routed to it, so that an expert
// shared by several tokens is read once.
#include <algorithm>

#include "exclusive.h"
#include "executor.h"
#include "layout.h"
#include "validate.h"

namespace freetoken::exec {

void Executor::experts_bf16(const ExpertsCall& call) {
  if (call.tokens == 0) return;  // an empty tensor has no address
  const Exclusive exclusive(busy_);
  validate(call);
  const std::size_t pairs = call.tokens * call.top_k;
  for (std::size_t pair = 0; pair < pairs; ++pair) {
    if (call.expert_ids[pair] < 0) std::fill_n(call.y + pair * call.hidden, call.hidden, 0.0F);
  }
  const FormatKernels& format = kernels_->bf16;
  groups_.by_expert(call.expert_ids, pairs, call.experts_count, format.max_width);
  if (groups_.groups().empty()) return;
  panels_.pack(groups_, format, call.x, call.tokens, call.hidden, call.top_k, pool_);
  middle_.reserve(groups_, format, round_up(call.intermediate, kRowsPerBlock));
  run_gate_up(call);
  run_down(call);
}

// silu(gate x) * up x of every group, as panels for the second product.
void Executor::run_gate_up(const ExpertsCall& call) {
  const FormatKernels& format = kernels_->bf16;
  const std::size_t block_bytes = format.block_bytes(call.hidden);
  tiles_.plan(groups_, ceil_div(call.intermediate, kRowsPerBlock), 2, block_bytes, format.max_width,
              threads_count());
  pool_.run(tiles_.tiles().size(), [&](std::uint32_t index, int worker) noexcept {
    const ProductTile& tile = tiles_.tiles()[index];
    const std::byte* weights = call.bank + groups_.groups()[tile.group].expert * call.record_bytes +
                               tile.first_unit * 2 * block_bytes;
    const auto block_pairs = static_cast<int>(tile.units_count);
    float* acc = accumulators(worker);
    for (std::size_t i = tile.first_panel; i < tile.first_panel + tile.panels_count; ++i) {
      const int width = groups_.panels()[i].width;
      format.dot(weights, 2 * block_pairs, call.hidden, panels_.at(i), width, acc);
      format.swiglu(acc, block_pairs, width, tile.first_unit * kRowsPerBlock, middle_.at(i));
    }
  });
}

// y = routing weight * down(middle).
void Executor::run_down(const ExpertsCall& call) {
  const FormatKernels& format = kernels_->bf16;
  const std::size_t columns = round_up(call.intermediate, kRowsPerBlock);
  const std::size_t block_bytes = format.block_bytes(columns);
  const std::size_t down_offset = 2 * (columns / kRowsPerBlock) * format.block_bytes(call.hidden);
  tiles_.plan(groups_, ceil_div(call.hidden, kRowsPerBlock), 1, block_bytes, format.max_width,
              threads_count());
  pool_.run(tiles_.tiles().size(), [&](std::uint32_t index, int worker) noexcept {
    const ProductTile& tile = tiles_.tiles()[index];
    const std::byte* weights = call.bank + groups_.groups()[tile.group].expert * call.record_bytes +
                               down_offset + tile.first_unit * block_bytes;
    float* acc = accumulators(worker);
    for (std::size_t i = tile.first_panel; i < tile.first_panel + tile.panels_count; ++i) {
      const Panel& panel = groups_.panels()[i];
      format.dot(weights, static_cast<int>(tile.units_count), columns, middle_.at(i), panel.width,
                 acc);
      store_weighted(call, tile, panel, acc);
    }
  });
}

void Executor::store_weighted(const ExpertsCall& call, const ProductTile& tile, const Panel& panel,
                              const float* acc) {
  for (std::size_t block = tile.first_unit; block < tile.first_unit + tile.units_count; ++block) {
    const std::size_t row = block * kRowsPerBlock;
    const std::size_t count = std::min(kRowsPerBlock, call.hidden - row);
    for (int i = 0; i < panel.width; ++i, acc += kRowsPerBlock) {
      const std::size_t pair = groups_.rows()[panel.first_row + static_cast<std::size_t>(i)];
      float* y = call.y + pair * call.hidden + row;
      for (std::size_t lane = 0; lane < count; ++lane) y[lane] = call.weights[pair] * acc[lane];
    }
  }
}

}  // namespace freetoken::exec
