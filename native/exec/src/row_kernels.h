// The row kernels of one instruction set.
#pragma once
#include <cstddef>

#include "bf16.h"
#include "row_ops.h"
#include "vector_math.h"

namespace freetoken::exec {
namespace {

template <class Isa>
struct RowOps {
  using F = typename Isa::F;

  static void head_norm(float* x, const float* weight, std::size_t size, float eps) {
    auto squares = Isa::zero();
    for (std::size_t i = 0; i < size; i += 16) {
      const auto v = load_first<Isa>(x + i, size - i);
      squares = Isa::fma(v, v, squares);
    }
    const float mean = Isa::reduce_add(squares) / static_cast<float>(size);
    const float inverse = 1.0F / __builtin_sqrtf(mean + eps);
    for (std::size_t i = 0; i < size; i += 16) {
      const auto scaled = Isa::mul(load_first<Isa>(x + i, size - i), Isa::set1(inverse));
      float lanes[16];
      Isa::store(lanes, Isa::mul(scaled, load_first<Isa>(weight + i, size - i)));
      for (std::size_t lane = 0; lane < 16 && i + lane < size; ++lane) {
        x[i + lane] = bf16_to_float(float_to_bf16(lanes[lane]));
      }
    }
  }

  // Blocks x Tokens accumulators: enough of them to hide the latency of a multiply-add.
  template <std::size_t Blocks, std::size_t Tokens>
  static void router_sums(const RouterTile& tile, std::size_t block, std::size_t token) {
    F acc[Blocks][Tokens];
    for (auto& row : acc) {
      for (F& one : row) one = Isa::zero();
    }
    const float* weights = tile.weights + block * tile.hidden * 16;
    const Bf16* x = tile.x + token * tile.hidden;
    for (std::size_t column = 0; column < tile.hidden; ++column) {
      F values[Tokens];
#pragma GCC unroll 4
      for (std::size_t t = 0; t < Tokens; ++t) {
        values[t] = Isa::set1(bf16_to_float(x[t * tile.hidden + column]));
      }
#pragma GCC unroll 4
      for (std::size_t b = 0; b < Blocks; ++b) {
        const F w = Isa::load(weights + (b * tile.hidden + column) * 16);
#pragma GCC unroll 4
        for (std::size_t t = 0; t < Tokens; ++t) acc[b][t] = Isa::fma(w, values[t], acc[b][t]);
      }
    }
    for (std::size_t b = 0; b < Blocks; ++b) {
      for (std::size_t t = 0; t < Tokens; ++t) {
        Isa::store(tile.logits + (token + t) * tile.logits_stride + (block + b) * 16, acc[b][t]);
      }
    }
  }

  static void router_logits(const RouterTile& tile) {
    std::size_t token = 0;
    for (; token + 4 <= tile.tokens; token += 4) {
      for (std::size_t block = 0; block < tile.blocks; ++block) {
        router_sums<1, 4>(tile, block, token);
      }
    }
    for (; token < tile.tokens; ++token) {
      std::size_t block = 0;
      for (; block + 4 <= tile.blocks; block += 4) router_sums<4, 1>(tile, block, token);
      for (; block < tile.blocks; ++block) router_sums<1, 1>(tile, block, token);
    }
  }

  static void softmax(float* values, std::size_t count) {
    auto best = Isa::load(values);
    for (std::size_t i = 16; i < count; i += 16) best = Isa::max(Isa::load(values + i), best);
    const auto peak = Isa::set1(Isa::reduce_max(best));
    auto sums = Isa::zero();
    for (std::size_t i = 0; i < count; i += 16) {
      const auto weight = exponential<Isa>(Isa::sub(Isa::load(values + i), peak));
      sums = Isa::add(sums, weight);
      Isa::store(values + i, weight);
    }
    const auto total = Isa::set1(Isa::reduce_add(sums));
    for (std::size_t i = 0; i < count; i += 16) {
      Isa::store(values + i, Isa::div(Isa::load(values + i), total));
    }
  }

  static void sigmoid(float* values, std::size_t count) {
    const auto one = Isa::set1(1.0F);
    for (std::size_t i = 0; i < count; i += 16) {
      const auto inverse = exponential<Isa>(Isa::sub(Isa::zero(), Isa::load(values + i)));
      Isa::store(values + i, Isa::div(one, Isa::add(one, inverse)));
    }
  }

  static constexpr RowKernels table() {
    return {.head_norm = head_norm,
            .router_logits = router_logits,
            .softmax = softmax,
            .sigmoid = sigmoid};
  }
};

}  // namespace
}  // namespace freetoken::exec
