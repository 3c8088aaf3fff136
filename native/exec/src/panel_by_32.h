// Packs panels that are arranged in units of 32 columns.
#pragma once
#include <cstddef>
#include <cstring>

#include "bf16.h"
#include "layout.h"

namespace freetoken::exec {
namespace {

inline constexpr std::size_t kPanelColumns = 32;

// Panel::store(values, index, token, width, columns, panel) puts columns [32 index, + 32) of one
// token into a panel of `columns` columns.
template <class Panel>
struct PanelBy32 {
  static void pack(const Bf16* const* rows, int width, std::size_t columns, std::byte* panel) {
    const auto tokens = static_cast<std::size_t>(width);
    for (std::size_t token = 0; token < tokens; ++token) {
      std::size_t column = 0;
      for (; column + kPanelColumns <= columns; column += kPanelColumns) {
        Panel::store(rows[token] + column, column / kPanelColumns, token, tokens, columns, panel);
      }
      if (column == columns) continue;
      Bf16 last[kPanelColumns] = {};
      std::memcpy(last, rows[token] + column, (columns - column) * sizeof(Bf16));
      Panel::store(last, column / kPanelColumns, token, tokens, columns, panel);
    }
  }

  static void put(const float* values, int blocks, int width, std::size_t first_column,
                  std::size_t columns, std::byte* panel) {
    const auto tokens = static_cast<std::size_t>(width);
    const std::size_t block_values = tokens * kRowsPerBlock;
    for (int block = 0; block < blocks; block += 2, values += 2 * block_values) {
      for (std::size_t token = 0; token < tokens; ++token) {
        Bf16 rounded[kPanelColumns] = {};
        const float* from = values + token * kRowsPerBlock;
        for (std::size_t i = 0; i < kRowsPerBlock; ++i) rounded[i] = float_to_bf16(from[i]);
        if (block + 1 < blocks) {
          for (std::size_t i = 0; i < kRowsPerBlock; ++i) {
            rounded[kRowsPerBlock + i] = float_to_bf16(from[block_values + i]);
          }
        }
        Panel::store(rounded, first_column / kPanelColumns, token, tokens, columns, panel);
      }
      first_column += kPanelColumns;
    }
  }
};

}  // namespace
}  // namespace freetoken::exec
