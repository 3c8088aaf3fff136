// Packed weights: "rows16" matrices and expert records. See docs of each function for the order.
#pragma once
#include <cstddef>
#include <cstdint>

#include "bf16.h"

namespace freetoken::exec {

inline constexpr std::size_t kRowsPerBlock = 16;
inline constexpr std::size_t kWeightAlignment = 64;

static constexpr std::size_t ceil_div(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit;
}

static constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
  return ceil_div(value, unit) * unit;
}

// Bytes of one block of 16 rows of `columns` bf16 columns (columns padded to an even number).
static constexpr std::size_t rows16_block_bytes(std::size_t columns) {
  return ceil_div(columns, 2) * kRowsPerBlock * 2 * sizeof(Bf16);
}

static constexpr std::size_t rows16_bytes(std::size_t rows, std::size_t columns) {
  return ceil_div(rows, kRowsPerBlock) * rows16_block_bytes(columns);
}

// [rows, columns] row-major -> [row block][column pair][row in block][element of the pair],
// padding filled with zeros. `packed` holds rows16_bytes(rows, columns) bytes.
void pack_rows16(const Bf16* row_major, std::size_t rows, std::size_t columns, Bf16* packed);

void unpack_rows16(const Bf16* packed, std::size_t rows, std::size_t columns, Bf16* row_major);

}  // namespace freetoken::exec
