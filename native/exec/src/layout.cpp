#include "layout.h"

namespace freetoken::exec {

void pack_rows16(const Bf16* row_major, std::size_t rows, std::size_t columns, Bf16* packed) {
  const std::size_t pairs = ceil_div(columns, 2);
  for (std::size_t first = 0; first < rows; first += kRowsPerBlock) {
    for (std::size_t pair = 0; pair < pairs; ++pair) {
      for (std::size_t lane = 0; lane < kRowsPerBlock; ++lane) {
        const std::size_t row = first + lane;
        for (std::size_t element = 0; element < 2; ++element) {
          const std::size_t column = 2 * pair + element;
          const bool inside = row < rows && column < columns;
          *packed++ = inside ? row_major[row * columns + column] : Bf16{0};
        }
      }
    }
  }
}

void unpack_rows16(const Bf16* packed, std::size_t rows, std::size_t columns, Bf16* row_major) {
  const std::size_t block_elements = rows16_block_bytes(columns) / sizeof(Bf16);
  for (std::size_t row = 0; row < rows; ++row) {
    const Bf16* block = packed + row / kRowsPerBlock * block_elements;
    const std::size_t lane = row % kRowsPerBlock;
    for (std::size_t column = 0; column < columns; ++column) {
      row_major[row * columns + column] =
          block[(column / 2 * kRowsPerBlock + lane) * 2 + column % 2];
    }
  }
}

}  // namespace freetoken::exec
