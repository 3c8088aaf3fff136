// Products of the formats with scales, for any instruction set: one group of 16 rows is decoded
// in plain C++ and then used for every token. The portable path, and the fallback of the others.
#pragma once
#include <cstddef>
#include <cstring>

#include "decode.h"
#include "kernels.h"
#include "layout.h"

namespace freetoken::exec {
namespace {

// Panels of singles, one token after the other: [token][columns rounded up to 32].
struct RowPanel {
  static std::size_t stride(std::size_t columns) { return round_up(columns, 32); }

  static std::size_t bytes(std::size_t columns, int width) {
    return stride(columns) * static_cast<std::size_t>(width) * sizeof(float);
  }

  static void pack(const Bf16* const* rows, int width, std::size_t columns, std::byte* panel) {
    auto* out = reinterpret_cast<float*>(panel);
    for (int token = 0; token < width; ++token, out += stride(columns)) {
      for (std::size_t i = 0; i < columns; ++i) out[i] = bf16_to_float(rows[token][i]);
      std::memset(out + columns, 0, (stride(columns) - columns) * sizeof(float));
    }
  }

  static void put(const float* values, int blocks, int width, std::size_t first_column,
                  std::size_t columns, std::byte* panel) {
    auto* out = reinterpret_cast<float*>(panel);
    const std::size_t step = stride(columns);
    for (int block = 0; block < blocks; ++block, first_column += kRowsPerBlock) {
      for (int token = 0; token < width; ++token, values += kRowsPerBlock) {
        float* row = out + static_cast<std::size_t>(token) * step + first_column;
        for (std::size_t lane = 0; lane < kRowsPerBlock; ++lane) {
          row[lane] = bf16_to_float(float_to_bf16(values[lane]));
        }
      }
    }
    // Columns up to the next multiple of 32 stand in the panel but in no block.
    if (first_column == columns && columns != step) {
      for (int token = 0; token < width; ++token) {
        std::memset(out + static_cast<std::size_t>(token) * step + columns, 0,
                    (step - columns) * sizeof(float));
      }
    }
  }
};

template <class Isa>
struct GenericProducts {
  using F = typename Isa::F;

  // acc <- acc + scale * (even columns + odd columns) - minimum * (sum of x), lane = row.
  static F add_group(F acc, const DecodedGroup& group, bool has_minimum, const float* x) {
    F even = Isa::zero();
    F odd = Isa::zero();
    for (std::size_t c = 0; c < group.columns; c += 2) {
      even = Isa::fma(Isa::load(group.codes[c]), Isa::set1(x[c]), even);
      if (c + 1 < group.columns) {
        odd = Isa::fma(Isa::load(group.codes[c + 1]), Isa::set1(x[c + 1]), odd);
      }
    }
    acc = Isa::fma(Isa::load(group.scale), Isa::add(even, odd), acc);
    if (!has_minimum) return acc;
    float sum = 0;
    for (std::size_t c = 0; c < group.columns; ++c) sum += x[c];
    return Isa::fma(Isa::sub(Isa::zero(), Isa::load(group.minimum)), Isa::set1(sum), acc);
  }

  static void dot(const WeightFormat& format, const std::byte* weights, int blocks,
                  std::size_t columns, const DotPanel* panels, int panels_count) {
    const std::size_t block_bytes = format.block_bytes(columns);
    const bool has_minimum = format.kind == WeightKind::kQ4K;
    DecodedGroup group;
    for (int block = 0; block < blocks; ++block, weights += block_bytes) {
      const BlockDecoder decoder(format, weights, columns);
      std::size_t column = 0;
      for (std::size_t g = 0; g < decoder.groups_count(); ++g, column += group.columns) {
        decoder.decode(g, group);
        for (int i = 0; i < panels_count; ++i) {
          const DotPanel& panel = panels[i];
          for (int token = 0; token < panel.width; ++token) {
            const auto index = static_cast<std::size_t>(block * panel.width + token);
            float* acc = panel.acc + index * kRowsPerBlock;
            const float* x = reinterpret_cast<const float*>(panel.data) +
                             static_cast<std::size_t>(token) * RowPanel::stride(columns) + column;
            const F before = g == 0 ? Isa::zero() : Isa::load(acc);
            Isa::store(acc, add_group(before, group, has_minimum, x));
          }
        }
      }
    }
  }

  static constexpr ProductKernels table() {
    return {.panel = {.bytes = RowPanel::bytes, .pack = RowPanel::pack, .put = RowPanel::put},
            .max_width = 8,
            .dot = dot};
  }
};

}  // namespace
}  // namespace freetoken::exec
