// The bf16 weight format: row blocks times panels of tokens.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels.h"
#include "layout.h"
#include "vector_math.h"

namespace freetoken::exec {
namespace {

// Row blocks are read as parallel streams, which hardware prefetchers follow; what they cannot
// know is where the next group of blocks starts. The last columns of a group prefetch the first
// lines of the next one. (Measured on Zen 3: prefetching all along costs up to 10 % with one
// token and gains nothing with several.)
inline constexpr std::size_t kAheadPairs = 16;
inline constexpr std::size_t kPairBytes = kRowsPerBlock * 2 * sizeof(Bf16);

template <class Isa>
struct Bf16Format {
  using F = typename Isa::F;
  using Activation = typename Isa::Activation;

  static std::size_t panel_bytes(std::size_t columns, int width) {
    return ceil_div(columns, 2) * Isa::kSteps * static_cast<std::size_t>(width) *
           sizeof(Activation);
  }

  // Element (column, token) of a panel: singles [column][token], or bf16 pairs [pair][token][2].
  static void put(std::byte* panel, std::size_t column, std::size_t token, std::size_t width,
                  Bf16 value) {
    if constexpr (Isa::kSteps == 2) {
      reinterpret_cast<float*>(panel)[column * width + token] = bf16_to_float(value);
    } else {
      reinterpret_cast<Bf16*>(panel)[(column / 2 * width + token) * 2 + column % 2] = value;
    }
  }

  static void pack_panel(const Bf16* const* rows, int width, std::size_t columns,
                         std::byte* panel) {
    const auto tokens = static_cast<std::size_t>(width);
    for (std::size_t token = 0; token < tokens; ++token) {
      const Bf16* row = rows[token];
      if (tokens == 1) {  // the stride known to the compiler: vectorised
        for (std::size_t column = 0; column < columns; ++column) {
          put(panel, column, 0, 1, row[column]);
        }
      } else
        for (std::size_t column = 0; column < columns; ++column) {
          put(panel, column, token, tokens, row[column]);
        }
      if (columns % 2 != 0) put(panel, columns, token, tokens, 0);
    }
  }

  template <std::size_t Blocks, std::size_t Width, int Step>
  static inline __attribute__((always_inline)) void step(const std::byte* weights,
                                                         std::size_t block_bytes,
                                                         const Activation* x,
                                                         F (&acc)[Blocks][Width]) {
#pragma GCC unroll 8
    for (std::size_t b = 0; b < Blocks; ++b) {
      const auto w = Isa::template decode<Step>(weights + b * block_bytes);
#pragma GCC unroll 16
      for (std::size_t t = 0; t < Width; ++t) {
        acc[b][t] = Isa::accumulate(acc[b][t], w, x + Step * Width + t);
      }
    }
  }

  template <std::size_t Blocks, std::size_t Width>
  static void tile(const std::byte* weights, std::size_t columns, const Activation* x, float* out) {
    F acc[Blocks][Width];
#pragma GCC unroll 8
    for (std::size_t b = 0; b < Blocks; ++b) {
#pragma GCC unroll 16
      for (std::size_t t = 0; t < Width; ++t) acc[b][t] = Isa::zero();
    }
    const std::size_t pairs = ceil_div(columns, 2);
    const std::size_t block_bytes = pairs * kPairBytes;
    const std::size_t ahead = pairs < kAheadPairs ? pairs : kAheadPairs;
    const std::size_t ahead_bytes = Blocks * block_bytes - (pairs - ahead) * kPairBytes;
    const auto columns_pair = [&]() __attribute__((always_inline)) {
      step<Blocks, Width, 0>(weights, block_bytes, x, acc);
      if constexpr (Isa::kSteps == 2) step<Blocks, Width, 1>(weights, block_bytes, x, acc);
      weights += kPairBytes;
      x += Isa::kSteps * Width;
    };
    for (std::size_t pair = ahead; pair < pairs; ++pair) columns_pair();
    for (std::size_t pair = 0; pair < ahead; ++pair) {
#pragma GCC unroll 8
      for (std::size_t b = 0; b < Blocks; ++b) {
        Isa::prefetch(weights + b * block_bytes + ahead_bytes);
      }
      columns_pair();
    }
#pragma GCC unroll 8
    for (std::size_t b = 0; b < Blocks; ++b) {
#pragma GCC unroll 16
      for (std::size_t t = 0; t < Width; ++t) Isa::store(out + (b * Width + t) * 16, acc[b][t]);
    }
  }

  // `blocks` blocks in groups as large as the registers allow.
  template <std::size_t Width, std::size_t Blocks = Isa::row_blocks(Width)>
  static void dot_width(const std::byte* weights, std::size_t blocks, std::size_t columns,
                        const Activation* x, float* acc) {
    const std::size_t block_bytes = rows16_block_bytes(columns);
    for (; blocks >= Blocks; blocks -= Blocks) {
      tile<Blocks, Width>(weights, columns, x, acc);
      weights += Blocks * block_bytes;
      acc += Blocks * Width * 16;
    }
    if constexpr (Blocks > 1) {
      if (blocks > 0) dot_width<Width, Blocks / 2>(weights, blocks, columns, x, acc);
    }
  }

  template <std::size_t... Index>
  static void dot_any(std::index_sequence<Index...> /*widths*/, const std::byte* weights,
                      std::size_t blocks, std::size_t columns, const std::byte* panel,
                      std::size_t width, float* acc) {
    const auto* x = reinterpret_cast<const Activation*>(panel);
    ((width == Index + 1 ? dot_width<Index + 1>(weights, blocks, columns, x, acc) : void()), ...);
  }

  static void dot(const WeightFormat& /*format*/, const std::byte* weights, int blocks,
                  std::size_t columns, const DotPanel* panels, int panels_count) {
    for (int i = 0; i < panels_count; ++i) {
      dot_any(std::make_index_sequence<Isa::kMaxWidth>{}, weights, static_cast<std::size_t>(blocks),
              columns, panels[i].data, static_cast<std::size_t>(panels[i].width), panels[i].acc);
    }
  }

  static void put_values(const float* values, int blocks, int width, std::size_t first_column,
                         std::size_t /*columns*/, std::byte* panel) {
    const auto tokens = static_cast<std::size_t>(width);
    for (int block = 0; block < blocks; ++block, first_column += kRowsPerBlock) {
      for (std::size_t token = 0; token < tokens; ++token, values += kRowsPerBlock) {
        for (std::size_t lane = 0; lane < kRowsPerBlock; ++lane) {
          put(panel, first_column + lane, token, tokens, float_to_bf16(values[lane]));
        }
      }
    }
  }

  static constexpr ProductKernels table() {
    return {.panel = {.bytes = panel_bytes, .pack = pack_panel, .put = put_values},
            .max_width = static_cast<int>(Isa::kMaxWidth),
            .dot = dot};
  }
};

}  // namespace
}  // namespace freetoken::exec
