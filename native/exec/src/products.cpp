// Linear layers and routed experts: products over tiles of row blocks and panels of tokens.
#include <algorithm>
#include <cstring>

#include "exclusive.h"
#include "executor.h"
#include "layout.h"
#include "validate.h"

namespace freetoken::exec {

const ProductKernels& Executor::products(const WeightFormat& format, bool fast) const {
  const auto kind = static_cast<std::size_t>(format.kind);
  const ProductKernels* quick = kernels_->products.fast[kind];
  return fast && quick != nullptr ? *quick : *kernels_->products.exact[kind];
}

bool Executor::has_fast(const WeightFormat& format) const {
  return kernels_->products.fast[static_cast<std::size_t>(format.kind)] != nullptr;
}

float* Executor::accumulators(int worker) {
  return accumulators_.get<float>(1) + kTileSums * static_cast<std::size_t>(worker);
}

// The sums of all panels of a tile, one panel's after the other's.
void Executor::dot_tile(const ProductKernels& kernels, const WeightFormat& format,
                        const ProductTile& tile, const std::byte* weights, int blocks,
                        std::size_t columns, Panels& panels, int worker) {
  DotPanel work[kTileTokens];
  float* acc = accumulators(worker);
  for (std::size_t i = 0; i < tile.panels_count; ++i) {
    const std::size_t number = tile.first_panel + i;
    const int width = groups_.panels()[number].width;
    work[i] = {.data = panels.at(number), .width = width, .acc = acc};
    acc += static_cast<std::size_t>(blocks * width) * kRowsPerBlock;
  }
  kernels.dot(format, weights, blocks, columns, work, static_cast<int>(tile.panels_count));
}

// store(panel number, panel, its sums) for all panels of a tile.
template <class Store>
void Executor::for_panels(const ProductTile& tile, int blocks, int worker, const Store& store) {
  float* acc = accumulators(worker);
  for (std::size_t i = tile.first_panel; i < tile.first_panel + tile.panels_count; ++i) {
    const Panel& panel = groups_.panels()[i];
    store(i, panel, acc);
    acc += static_cast<std::size_t>(blocks * panel.width) * kRowsPerBlock;
  }
}

namespace {

// The factor over all of a matrix that stands alone.
float factor_of(const LinearOutput& output, std::size_t in_features) {
  if (!output.format.has_global()) return 1.0F;
  float factor;
  std::memcpy(&factor, output.w + output.format.blocks_bytes(output.out_features, in_features),
              sizeof factor);
  return factor;
}

void store_linear(const LinearOutput& output, float factor, const ProductTile& tile,
                  const Panel& panel, const float* acc) {
  for (std::size_t block = tile.first_unit; block < tile.first_unit + tile.units_count; ++block) {
    const std::size_t row = block * kRowsPerBlock;
    const std::size_t count = std::min(kRowsPerBlock, output.out_features - row);
    for (int i = 0; i < panel.width; ++i, acc += kRowsPerBlock) {
      // In a linear layer the panel's rows are consecutive tokens.
      const std::size_t token = panel.first_row + static_cast<std::size_t>(i);
      float* y = output.y + token * output.out_features + row;
      for (std::size_t lane = 0; lane < count; ++lane) {
        const float product = acc[lane] * factor;
        y[lane] = output.bias != nullptr ? product + output.bias[row + lane] : product;
      }
    }
  }
}

}  // namespace

void Executor::linear(const LinearCall& call) {
  if (call.tokens == 0 || call.outputs.empty()) return;  // an empty tensor has no address
  const Exclusive exclusive(busy_);
  validate(call);
  // Matrices that read activations in the same arrangement go together.
  const auto kernels_of = [&](const LinearOutput& output) {
    return &products(output.format, call.fast);
  };
  std::size_t begin = 0;
  while (begin < call.outputs.size()) {
    std::size_t end = begin + 1;
    while (end < call.outputs.size() &&
           kernels_of(call.outputs[end]) == kernels_of(call.outputs[begin])) {
      ++end;
    }
    linear_run(call, call.outputs.subspan(begin, end - begin));
    begin = end;
  }
}

void Executor::linear_run(const LinearCall& call, std::span<const LinearOutput> outputs) {
  const ProductKernels& kernels = products(outputs[0].format, call.fast);
  groups_.all_tokens(call.tokens, kernels.max_width);
  panels_.pack(groups_, kernels.panel, call.x, call.tokens, call.in_features, 1, pool_);
  std::size_t share_blocks = 0;
  for (const LinearOutput& output : outputs) {
    share_blocks += ceil_div(output.out_features, kRowsPerBlock);
  }
  tiles_.clear();
  for (std::size_t matrix = 0; matrix < outputs.size(); ++matrix) {
    tiles_.add(groups_, matrix, ceil_div(outputs[matrix].out_features, kRowsPerBlock), 1,
               outputs[matrix].format.block_bytes(call.in_features), kernels.max_width,
               share_blocks, threads_count());
  }
  pool_.run(tiles_.tiles().size(), [&](std::uint32_t index, int worker) noexcept {
    const ProductTile& tile = tiles_.tiles()[index];
    const LinearOutput& output = outputs[tile.matrix];
    const std::size_t offset = tile.first_unit * output.format.block_bytes(call.in_features);
    const auto blocks = static_cast<int>(tile.units_count);
    const float factor = factor_of(output, call.in_features);
    dot_tile(kernels, output.format, tile, output.w + offset, blocks, call.in_features, panels_,
             worker);
    for_panels(tile, blocks, worker, [&](std::size_t, const Panel& panel, const float* acc) {
      store_linear(output, factor, tile, panel, acc);
    });
  });
}

void Executor::experts(const ExpertsCall& call) {
  if (call.tokens == 0) return;  // an empty tensor has no address
  const Exclusive exclusive(busy_);
  validate(call);
  const std::size_t pairs = call.tokens * call.top_k;
  for (std::size_t pair = 0; pair < pairs && !call.keep_absent; ++pair) {
    if (call.expert_ids[pair] < 0) std::fill_n(call.y + pair * call.hidden, call.hidden, 0.0F);
  }
  const ProductKernels& kernels = products(call.format, call.fast);
  groups_.by_expert(call.expert_ids, pairs, call.experts_count, kernels.max_width);
  if (groups_.groups().empty()) return;
  panels_.pack(groups_, kernels.panel, call.x, call.tokens, call.hidden, call.top_k, pool_);
  middle_.reserve(groups_, kernels.panel, round_up(call.intermediate, kRowsPerBlock));
  const ExpertLayout layout =
      expert_layout(call.format, call.hidden, call.intermediate, call.has_bias);
  run_gate_up(call, layout);
  run_down(call, layout);
}

namespace {

const float* floats_at(const std::byte* record, std::size_t offset) {
  return offset == 0 ? nullptr : reinterpret_cast<const float*>(record + offset);
}

}  // namespace

// act(gate x) * up x of every group, as panels for the second product.
void Executor::run_gate_up(const ExpertsCall& call, const ExpertLayout& layout) {
  const ProductKernels& kernels = products(call.format, call.fast);
  const std::size_t columns = round_up(call.intermediate, kRowsPerBlock);
  const std::size_t units = columns / kRowsPerBlock;
  tiles_.clear();
  tiles_.add(groups_, 0, units, 2, layout.gate_up_block_bytes, kernels.max_width,
             2 * units * groups_.groups().size(), threads_count());
  pool_.run(tiles_.tiles().size(), [&](std::uint32_t index, int worker) noexcept {
    const ProductTile& tile = tiles_.tiles()[index];
    const std::byte* record = call.record(groups_.groups()[tile.group].expert);
    const std::size_t row = tile.first_unit * kRowsPerBlock;
    const float* globals = floats_at(record, layout.globals_offset);
    const float* gate_bias = floats_at(record, layout.gate_bias_offset);
    const float* up_bias = floats_at(record, layout.up_bias_offset);
    const auto pairs = static_cast<int>(tile.units_count);
    dot_tile(kernels, call.format, tile, record + tile.first_unit * 2 * layout.gate_up_block_bytes,
             2 * pairs, call.hidden, panels_, worker);
    for_panels(tile, 2 * pairs, worker, [&](std::size_t number, const Panel& panel, float* acc) {
      kernels_->glu(call.glu, {.acc = acc,
                               .block_pairs = pairs,
                               .width = panel.width,
                               .gate_scale = globals != nullptr ? globals[0] : 1.0F,
                               .up_scale = globals != nullptr ? globals[1] : 1.0F,
                               .gate_bias = gate_bias != nullptr ? gate_bias + row : nullptr,
                               .up_bias = up_bias != nullptr ? up_bias + row : nullptr,
                               .values = acc});
      kernels.panel.put(acc, pairs, panel.width, row, columns, middle_.at(number));
    });
  });
}

// y = routing weight * (down(middle) + bias).
void Executor::run_down(const ExpertsCall& call, const ExpertLayout& layout) {
  const ProductKernels& kernels = products(call.format, call.fast);
  const std::size_t columns = round_up(call.intermediate, kRowsPerBlock);
  const std::size_t units = ceil_div(call.hidden, kRowsPerBlock);
  tiles_.clear();
  tiles_.add(groups_, 0, units, 1, layout.down_block_bytes, kernels.max_width,
             units * groups_.groups().size(), threads_count());
  pool_.run(tiles_.tiles().size(), [&](std::uint32_t index, int worker) noexcept {
    const ProductTile& tile = tiles_.tiles()[index];
    const std::byte* record = call.record(groups_.groups()[tile.group].expert);
    const float* globals = floats_at(record, layout.globals_offset);
    const float scale = globals != nullptr ? globals[2] : 1.0F;
    const float* bias = floats_at(record, layout.down_bias_offset);
    const auto blocks = static_cast<int>(tile.units_count);
    dot_tile(kernels, call.format, tile,
             record + layout.down_offset + tile.first_unit * layout.down_block_bytes, blocks,
             columns, middle_, worker);
    for_panels(tile, blocks, worker, [&](std::size_t, const Panel& panel, const float* acc) {
      for (std::size_t block = tile.first_unit; block < tile.first_unit + tile.units_count;
           ++block) {
        const std::size_t row = block * kRowsPerBlock;
        const std::size_t count = std::min(kRowsPerBlock, call.hidden - row);
        for (int i = 0; i < panel.width; ++i, acc += kRowsPerBlock) {
          const std::size_t pair = groups_.rows()[panel.first_row + static_cast<std::size_t>(i)];
          float* y = call.y + pair * call.hidden + row;
          for (std::size_t lane = 0; lane < count; ++lane) {
            const float down = acc[lane] * scale + (bias != nullptr ? bias[row + lane] : 0.0F);
            y[lane] = call.weights[pair] * down;
          }
        }
      }
    });
  });
}

}  // namespace freetoken::exec
