// Shapes of AMX tiles, and panels of activations whose 32 columns are rows of a tile.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "layout.h"
#include "panel_by_32.h"

namespace freetoken::exec {
namespace {

inline constexpr std::size_t kTileLine = 64;  // bytes of a row of a tile

// Orders writes to memory before the tile instructions that follow: the compiler does not know what
// these read.
inline __attribute__((always_inline)) void finish_writes() { __asm__ volatile("" : : : "memory"); }

// What the processor reads as the shape of its eight tiles.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  void set(std::size_t tile, std::size_t rows_count, std::size_t bytes) {
    rows[tile] = static_cast<std::uint8_t>(rows_count);
    row_bytes[tile] = static_cast<std::uint16_t>(bytes);
  }

  void load() const {
    __asm__ volatile("" : : "r"(this) : "memory");  // as finish_writes, for this object too
    _tile_loadconfig(this);
  }
};
static_assert(sizeof(TileConfig) == 64);

// [32 columns][token][32] bf16; columns are padded with zeros.
struct AmxPanel {
  static std::size_t bytes(std::size_t columns, int width) {
    return round_up(columns, kPanelColumns) * static_cast<std::size_t>(width) * sizeof(Bf16);
  }
  static void store(const Bf16* values, std::size_t index, std::size_t token, std::size_t width,
                    std::size_t /*columns*/, std::byte* panel) {
    constexpr std::size_t kBytes = kPanelColumns * sizeof(Bf16);
    std::memcpy(panel + (index * width + token) * kBytes, values, kBytes);
  }
};

}  // namespace
}  // namespace freetoken::exec
