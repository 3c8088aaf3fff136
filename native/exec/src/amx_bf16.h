// bf16 weights on AMX tiles: a block's 32 columns are the second operand as they lie in memory, a
// panel's tokens the rows of the first.
//
// tdpbf16ps adds up the even and the odd columns of 32 apart and then both to the sum; a sum
// depends on its token and row only, not on the number of tokens. Subnormals count as zero.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "amx_tiles.h"
#include "kernels.h"
#include "layout.h"
#include "panel_by_32.h"
#include "stream_codes.h"

namespace freetoken::exec {
namespace {

struct AmxBf16 {
  static constexpr std::size_t kMaxWidth = 16;
  static constexpr std::size_t kLine = kTileLine;
  static constexpr std::size_t kTileBytes = 16 * kLine;  // 16 rows of weights, 32 columns
  static constexpr std::size_t kTilePairs = kPanelColumns / 2;

  // Tiles 0-3: sums of four blocks, [token][16]; 4: activations; 5: weights; 6 and 7: the same for
  // the last columns where they are not 32.
  static void configure(std::size_t width, std::size_t last_pairs) {
    TileConfig config;
    for (std::size_t tile = 0; tile < 4; ++tile) config.set(tile, width, kLine);
    config.set(4, width, kLine);
    config.set(5, kTilePairs, kLine);
    if (last_pairs != 0) {
      config.set(6, width, last_pairs * 2 * sizeof(Bf16));
      config.set(7, last_pairs, kLine);
    }
    config.load();
  }

  static inline __attribute__((always_inline)) void prefetch(const std::byte* weights,
                                                             std::size_t ahead = kAheadBytes) {
#pragma GCC unroll 16
    for (std::size_t i = 0; i < kTileBytes; i += kLine) {
      _mm_prefetch(weights + i + ahead, _MM_HINT_T0);
    }
  }

  // Four blocks at once: they share the load of the activations and hide the products' latency.
  static void four_blocks(const std::byte* weights, std::size_t block_bytes, std::size_t columns,
                          const std::byte* x, std::size_t width, float* acc) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const std::byte* block[4] = {weights, weights + block_bytes, weights + 2 * block_bytes,
                                 weights + 3 * block_bytes};
    std::size_t offset = 0;
    for (std::size_t column = 0; column + kPanelColumns <= columns; column += kPanelColumns) {
      const std::size_t ahead = ahead_bytes(offset, block_bytes, 4);
      _tile_loadd(4, x, kLine);
      prefetch(block[0] + offset, ahead);
      _tile_loadd(5, block[0] + offset, kLine);
      _tile_dpbf16ps(0, 4, 5);
      prefetch(block[1] + offset, ahead);
      _tile_loadd(5, block[1] + offset, kLine);
      _tile_dpbf16ps(1, 4, 5);
      prefetch(block[2] + offset, ahead);
      _tile_loadd(5, block[2] + offset, kLine);
      _tile_dpbf16ps(2, 4, 5);
      prefetch(block[3] + offset, ahead);
      _tile_loadd(5, block[3] + offset, kLine);
      _tile_dpbf16ps(3, 4, 5);
      x += width * kLine;
      offset += kTileBytes;
    }
    if (columns % kPanelColumns != 0) {
      _tile_loadd(6, x, kLine);
      _tile_loadd(7, block[0] + offset, kLine);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(7, block[1] + offset, kLine);
      _tile_dpbf16ps(1, 6, 7);
      _tile_loadd(7, block[2] + offset, kLine);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(7, block[3] + offset, kLine);
      _tile_dpbf16ps(3, 6, 7);
    }
    const std::size_t sums = width * kRowsPerBlock;
    _tile_stored(0, acc, kLine);
    _tile_stored(1, acc + sums, kLine);
    _tile_stored(2, acc + 2 * sums, kLine);
    _tile_stored(3, acc + 3 * sums, kLine);
  }

  static void one_block(const std::byte* weights, std::size_t columns, const std::byte* x,
                        std::size_t width, float* acc) {
    _tile_zero(0);
    for (std::size_t column = 0; column + kPanelColumns <= columns; column += kPanelColumns) {
      _tile_loadd(4, x, kLine);
      prefetch(weights);
      _tile_loadd(5, weights, kLine);
      _tile_dpbf16ps(0, 4, 5);
      x += width * kLine;
      weights += kTileBytes;
    }
    if (columns % kPanelColumns != 0) {
      _tile_loadd(6, x, kLine);
      _tile_loadd(7, weights, kLine);
      _tile_dpbf16ps(0, 6, 7);
    }
    _tile_stored(0, acc, kLine);
  }

  static void dot(const WeightFormat& /*format*/, const std::byte* weights, int blocks,
                  std::size_t columns, const DotPanel* panels, int panels_count) {
    const std::size_t block_bytes = rows16_block_bytes(columns);
    const std::size_t last_pairs = ceil_div(columns % kPanelColumns, 2);
    std::size_t configured = 0;
    int block = 0;
    while (block < blocks) {
      const int step = blocks - block >= 4 ? 4 : 1;
      for (int i = 0; i < panels_count; ++i) {
        const auto width = static_cast<std::size_t>(panels[i].width);
        if (width != configured) configure(width, last_pairs);
        configured = width;
        float* acc = panels[i].acc + static_cast<std::size_t>(block) * width * kRowsPerBlock;
        if (step == 4) {
          four_blocks(weights, block_bytes, columns, panels[i].data, width, acc);
        } else {
          one_block(weights, columns, panels[i].data, width, acc);
        }
      }
      weights += static_cast<std::size_t>(step) * block_bytes;
      block += step;
    }
    // Tiles in use make every switch of threads save eight kilobytes.
    _tile_release();
  }

  static constexpr ProductKernels table() {
    return {.panel = {.bytes = AmxPanel::bytes,
                      .pack = PanelBy32<AmxPanel>::pack,
                      .put = PanelBy32<AmxPanel>::put},
            .max_width = static_cast<int>(kMaxWidth),
            .dot = dot};
  }
};

}  // namespace
}  // namespace freetoken::exec
