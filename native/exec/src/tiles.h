// How the row blocks and panels of a product are cut into tiles for the workers.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "layout.h"
#include "panels.h"

namespace freetoken::exec {

struct ProductTile {
  std::size_t matrix;  // of several over the same activations
  std::size_t group;
  std::size_t first_unit;  // a unit is one row block, or a gate block and its up block
  std::size_t units_count;
  std::size_t first_panel;
  std::size_t panels_count;
};

// Bounds of one tile. 256 KiB of weights are read in 5 to 10 us: long against the cost of a claim
// (about 0.1 us), short against a step, and they stay in L2 while several panels use them.
inline constexpr std::size_t kTileBytes = std::size_t{256} << 10;
inline constexpr std::size_t kTileBlocks = 32;
inline constexpr std::size_t kTileTokens = 48;
inline constexpr std::size_t kTilesPerWorker = 8;
inline constexpr std::size_t kBlocksAtOnce = 4;  // the kernels' largest group of row blocks

inline constexpr int kWidestPanel = 16;
// Sums of one tile: every block of it for every token of its panels.
inline constexpr std::size_t kTileSums =
    kTileBlocks * (kTileTokens + static_cast<std::size_t>(kWidestPanel)) * kRowsPerBlock;

class ProductTiles {
 public:
  void clear() { tiles_.clear(); }

  // Adds the tiles of one matrix (of one per group). `share_blocks`: row blocks of the whole job,
  // to be shared among the workers.
  void add(const TokenGroups& groups, std::size_t matrix, std::size_t units,
           std::size_t blocks_per_unit, std::size_t block_bytes, int max_width,
           std::size_t share_blocks, int workers) {
    const std::size_t step = units_per_tile(blocks_per_unit, block_bytes, share_blocks, workers);
    const std::size_t panels_step =
        std::max<std::size_t>(1, kTileTokens / static_cast<std::size_t>(max_width));
    for (std::size_t g = 0; g < groups.groups().size(); ++g) {
      const Group& group = groups.groups()[g];
      for (std::size_t unit = 0; unit < units; unit += step) {
        for (std::size_t panel = 0; panel < group.panels_count; panel += panels_step) {
          tiles_.push_back({.matrix = matrix,
                            .group = g,
                            .first_unit = unit,
                            .units_count = std::min(step, units - unit),
                            .first_panel = group.first_panel + panel,
                            .panels_count = std::min(panels_step, group.panels_count - panel)});
        }
      }
    }
  }

  const std::vector<ProductTile>& tiles() const { return tiles_; }

 private:
  // A multiple of 32 rows, as PanelKernels::put wants it.
  static std::size_t units_per_tile(std::size_t blocks_per_unit, std::size_t block_bytes,
                                    std::size_t share_blocks, int workers) {
    const std::size_t by_size = kTileBytes / block_bytes;
    const std::size_t by_share =
        share_blocks / (kTilesPerWorker * static_cast<std::size_t>(workers));
    const std::size_t blocks = std::min({by_size, by_share, kTileBlocks}) / kBlocksAtOnce;
    return std::max<std::size_t>(1, blocks) * kBlocksAtOnce / blocks_per_unit;
  }

  std::vector<ProductTile> tiles_;
};

}  // namespace freetoken::exec
