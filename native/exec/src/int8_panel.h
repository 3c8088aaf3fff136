// Activations rounded to int8, one scale per 32 columns: x = scale * code, scale = largest / 127.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bf16.h"
#include "layout.h"

namespace freetoken::exec {
namespace {

// kPlain: columns in order. kNibbles: of every eight, in the order in which the low and then the
// high nibbles of a 4-bit step come: 0 4 1 5, 2 6 3 7.
enum class ColumnOrder { kPlain, kNibbles };

template <ColumnOrder Order>
struct Int8Panel {
  static constexpr std::size_t kGroup = 32;

  // One token: codes [stride], then scales [stride / 32], then sums of 16 codes [stride / 16].
  struct Row {
    const std::int8_t* codes;
    const float* scales;
    const std::int32_t* sums;
  };

  static std::size_t stride(std::size_t columns) { return round_up(columns, kGroup); }
  static std::size_t row_bytes(std::size_t columns) {
    const std::size_t groups = stride(columns) / kGroup;
    return round_up(groups * (kGroup + sizeof(float) + 2 * sizeof(std::int32_t)), 64);
  }
  static std::size_t bytes(std::size_t columns, int width) {
    return row_bytes(columns) * static_cast<std::size_t>(width);
  }

  static Row row(const std::byte* panel, std::size_t token, std::size_t columns) {
    const std::byte* begin = panel + token * row_bytes(columns);
    const std::byte* scales = begin + stride(columns);
    return {.codes = reinterpret_cast<const std::int8_t*>(begin),
            .scales = reinterpret_cast<const float*>(scales),
            .sums = reinterpret_cast<const std::int32_t*>(scales + stride(columns) / kGroup *
                                                                       sizeof(float))};
  }

  static void pack(const Bf16* const* rows, int width, std::size_t columns, std::byte* panel) {
    float values[kGroup];
    for (int token = 0; token < width; ++token, panel += row_bytes(columns)) {
      for (std::size_t first = 0; first < columns; first += kGroup) {
        for (std::size_t i = 0; i < kGroup; ++i) {
          values[i] = first + i < columns ? bf16_to_float(rows[token][first + i]) : 0.0F;
        }
        put_group(values, first, columns, panel);
      }
    }
  }

  static void put(const float* values, int blocks, int width, std::size_t first_column,
                  std::size_t columns, std::byte* panel) {
    const auto tokens = static_cast<std::size_t>(width);
    float group[kGroup];
    for (int block = 0; block < blocks; block += 2, first_column += kGroup) {
      for (std::size_t token = 0; token < tokens; ++token) {
        for (std::size_t i = 0; i < kGroup; ++i) {
          const std::size_t row = static_cast<std::size_t>(block) + i / kRowsPerBlock;
          const float* from = values + (row * tokens + token) * kRowsPerBlock;
          group[i] = row < static_cast<std::size_t>(blocks)
                         ? bf16_to_float(float_to_bf16(from[i % kRowsPerBlock]))
                         : 0.0F;
        }
        put_group(group, first_column, columns, panel + token * row_bytes(columns));
      }
    }
  }

 private:
  static std::size_t place(std::size_t i) {
    constexpr std::uint8_t kPlaces[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    return Order == ColumnOrder::kPlain ? i : i / 8 * 8 + kPlaces[i % 8];
  }

  static void put_group(const float (&values)[kGroup], std::size_t first, std::size_t columns,
                        std::byte* row) {
    float largest = 0;
    bool has_nan = false;  // a maximum passes over it; the scale brings it to the result
    for (const float value : values) {
      const float magnitude = std::fabs(value);
      largest = magnitude > largest ? magnitude : largest;
      has_nan |= std::isnan(value);
    }
    // Numbers so small that the quotient is infinite count as zero.
    const float inverse = largest > 1e-35F ? 127.0F / largest : 0.0F;
    auto* codes = reinterpret_cast<std::int8_t*>(row) + first;
    std::int32_t sums[2] = {};
    for (std::size_t i = 0; i < kGroup; ++i) {
      // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, into the low bits.
      const float shifted = values[i] * inverse + 12582912.0F;
      std::uint32_t bits = 0;
      std::memcpy(&bits, &shifted, sizeof bits);
      const auto code = static_cast<std::int8_t>(bits & 0xffU);
      codes[place(i)] = code;
      sums[i / 16] += code;
    }
    const std::size_t group = first / kGroup;
    auto* scales = reinterpret_cast<float*>(row + stride(columns));
    scales[group] = has_nan ? NAN : largest / 127.0F;
    auto* all_sums = reinterpret_cast<std::int32_t*>(scales + stride(columns) / kGroup);
    all_sums[2 * group] = sums[0];
    all_sums[2 * group + 1] = sums[1];
  }
};

}  // namespace
}  // namespace freetoken::exec
