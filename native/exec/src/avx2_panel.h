// Activations as the AVX2 kernels of the formats with scales read them.
#pragma once
#include <cstddef>

#include "bf16.h"
#include "layout.h"

namespace freetoken::exec {
namespace {

// Pairs of columns (rounded up to 32 columns), of each pair the singles of one token after the
// other; then two numbers for every kSumColumns columns and token, in units of the codec's values:
// their sum, and what must be added because products of the values are too large. Each stands
// before a zero, a pair of columns like others.
template <class Codec>
struct SummedPanel {
  static constexpr std::size_t kSumColumns = Codec::kSumColumns;
  static constexpr std::size_t kNumbers = 4;  // singles of kSumColumns columns and a token

  static std::size_t stride(std::size_t columns) { return round_up(columns, 32); }
  static std::size_t row_floats(std::size_t columns) {
    return round_up(stride(columns) + stride(columns) / kSumColumns * kNumbers, 16);
  }
  static std::size_t bytes(std::size_t columns, int width) {
    return row_floats(columns) * static_cast<std::size_t>(width) * sizeof(float);
  }

  // Where the columns from `first` on, an even one, stand: pairs, 2 * width singles apart.
  static const float* pairs(const float* panel, std::size_t first, std::size_t width) {
    return panel + first * width;
  }
  // Where their numbers stand: kNumbers singles per token, and so on kSumColumns further. A sum is
  // the first of them, a correction the third.
  static const float* numbers(const float* panel, std::size_t first, std::size_t columns,
                              std::size_t width) {
    return panel + (stride(columns) + first / kSumColumns * kNumbers) * width;
  }

  static void pack(const Bf16* const* rows, int width, std::size_t columns, std::byte* panel) {
    const auto tokens = static_cast<std::size_t>(width);
    float values[kSumColumns];
    for (std::size_t token = 0; token < tokens; ++token) {
      const Bf16* row = rows[token];
      for (std::size_t first = 0; first < stride(columns); first += kSumColumns) {
        for (std::size_t i = 0; i < kSumColumns; ++i) {
          values[i] = first + i < columns ? Codec::kInput * bf16_to_float(row[first + i]) : 0.0F;
        }
        store(values, first, token, tokens, columns, panel);
      }
    }
  }

  static void put(const float* values, int blocks, int width, std::size_t first_column,
                  std::size_t columns, std::byte* panel) {
    const auto tokens = static_cast<std::size_t>(width);
    const std::size_t end = first_column + static_cast<std::size_t>(blocks) * kRowsPerBlock;
    const std::size_t padded_end = end == columns ? stride(columns) : end;
    float some[kSumColumns];
    for (std::size_t first = first_column; first < padded_end; first += kSumColumns) {
      for (std::size_t token = 0; token < tokens; ++token) {
        for (std::size_t i = 0; i < kSumColumns; i += kRowsPerBlock) {
          const std::size_t block = (first + i - first_column) / kRowsPerBlock;
          const float* from = values + (block * tokens + token) * kRowsPerBlock;
          for (std::size_t lane = 0; lane < kRowsPerBlock; ++lane) {
            some[i + lane] =
                first + i < end ? Codec::kInput * bf16_to_float(float_to_bf16(from[lane])) : 0.0F;
          }
        }
        store(some, first, token, tokens, columns, panel);
      }
    }
  }

 private:
  // kSumColumns columns of one token.
  static void store(float (&values)[kSumColumns], std::size_t first, std::size_t token,
                    std::size_t tokens, std::size_t columns, std::byte* panel) {
    float shifted = 0;
    float unshifted = 0;
    for (std::size_t i = 0; i < kSumColumns; i += 8) {
      for (std::size_t j = i; j < i + 4; ++j) {
        shifted += values[j];
        unshifted += values[j + 4];
        if constexpr (Codec::kShifted) values[j] -= 0x1p-16F * values[j + 4];
      }
    }
    auto* all = reinterpret_cast<float*>(panel);
    float* out = all + first * tokens + 2 * token;
    for (std::size_t i = 0; i < kSumColumns; i += 2, out += 2 * tokens) {
      out[0] = values[i];
      out[1] = values[i + 1];
    }
    float* numbers =
        all + (stride(columns) + first / kSumColumns * kNumbers) * tokens + kNumbers * token;
    numbers[0] = (shifted + unshifted) / Codec::kUnit;
    numbers[2] = -Codec::kOffset * numbers[0];
    if constexpr (Codec::kShifted) numbers[2] -= Codec::kResidue * 0x1p-16F * unshifted;
    numbers[1] = numbers[3] = 0.0F;
  }
};

}  // namespace
}  // namespace freetoken::exec
