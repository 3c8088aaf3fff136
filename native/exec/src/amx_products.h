// Products with bf16 activations of the formats with scales, on AMX tiles.
//
// A part of a block is decoded to bf16 pairs in the first-level cache, which lie there as tiles
// want them. Each group of columns is a product of its own; its sums, times the scale, join the
// totals in the order of the groups. Narrow panels take another way to the same sums (amx_narrow.h),
// so that a sum depends on its token and row only.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstring>

#include "amx_narrow.h"
#include "amx_tiles.h"
#include "avx512_bf16_codes.h"
#include "avx512_products.h"
#include "block_groups.h"
#include "isa_avx512_bf16.h"
#include "kernels.h"
#include "layout.h"
#include "panel_by_32.h"

namespace freetoken::exec {
namespace {

// Up to how many tokens are multiplied without tiles. (Measured on Sapphire Rapids.)
inline constexpr std::size_t kNarrowWidth = 4;

// An AmxPanel, then [32 columns][token] sums; narrow ones as AmxNarrow has them.
struct SummedAmxPanel {
  using Isa = Avx512Isa;
  using Narrow = AmxNarrow::Panel;

  static std::size_t bytes(std::size_t columns, int width) {
    if (static_cast<std::size_t>(width) <= kNarrowWidth) return Narrow::bytes(columns, width);
    return AmxPanel::bytes(columns, width) +
           ceil_div(columns, kPanelColumns) * static_cast<std::size_t>(width) * sizeof(float);
  }
  static const float* sums(const std::byte* panel, std::size_t columns, int width) {
    return reinterpret_cast<const float*>(panel + AmxPanel::bytes(columns, width));
  }
  static void store(const Bf16* values, std::size_t index, std::size_t token, std::size_t width,
                    std::size_t columns, std::byte* panel) {
    if (width <= kNarrowWidth) {
      Narrow::store(values, index, token, width, columns, panel);
      return;
    }
    AmxPanel::store(values, index, token, width, columns, panel);
    auto* all = reinterpret_cast<float*>(panel + AmxPanel::bytes(columns, static_cast<int>(width)));
    all[index * width + token] =
        Isa::reduce_add(Isa::add(Isa::load_bf16(values), Isa::load_bf16(values + 16)));
  }
};

struct AmxProducts {
  using Isa = Avx512Isa;
  using Decoded = Avx512Products<Avx512Bf16Isa, Avx512Bf16Codes>;
  using Tile = Decoded::Tile;
  static constexpr std::size_t kMaxWidth = 16;
  static constexpr std::size_t kPairs = kPanelColumns / 2;
  static constexpr std::size_t kSums = 4;  // tiles of sums

  // Tiles 0-3: sums of four groups, [token][16]; 4: activations, 5: codes, both of a group's
  // columns, or of 32 of them.
  static void configure(std::size_t width, std::size_t columns) {
    TileConfig config;
    for (std::size_t tile = 0; tile < kSums; ++tile) config.set(tile, width, kTileLine);
    config.set(4, width, columns * sizeof(Bf16));
    config.set(5, columns / 2, kTileLine);
    config.load();
  }

  // Names of tiles are part of the instructions.
  template <std::size_t Sum>
  static inline __attribute__((always_inline)) void multiply() {
    if constexpr (Sum == 0) _tile_dpbf16ps(0, 4, 5);
    if constexpr (Sum == 1) _tile_dpbf16ps(1, 4, 5);
    if constexpr (Sum == 2) _tile_dpbf16ps(2, 4, 5);
    if constexpr (Sum == 3) _tile_dpbf16ps(3, 4, 5);
  }
  template <std::size_t Sum>
  static inline __attribute__((always_inline)) void clear() {
    if constexpr (Sum == 0) _tile_zero(0);
    if constexpr (Sum == 1) _tile_zero(1);
    if constexpr (Sum == 2) _tile_zero(2);
    if constexpr (Sum == 3) _tile_zero(3);
  }
  template <std::size_t Sum>
  static inline __attribute__((always_inline)) void store(float* sums) {
    if constexpr (Sum == 0) _tile_stored(0, sums, kTileLine);
    if constexpr (Sum == 1) _tile_stored(1, sums, kTileLine);
    if constexpr (Sum == 2) _tile_stored(2, sums, kTileLine);
    if constexpr (Sum == 3) _tile_stored(3, sums, kTileLine);
  }

  // Sums of one group of a tile, [token][16].
  template <std::size_t Sum>
  static inline __attribute__((always_inline)) void group_sums(const Tile& tile, std::size_t group,
                                                               const std::byte* x,
                                                               std::size_t width, float* sums) {
    const std::size_t pairs = tile.group_units < kPairs ? tile.group_units : kPairs;
    const std::size_t first = group * tile.group_units;
    const std::size_t whole = first + tile.group_units;
    const std::size_t end = whole < tile.units_count ? whole : tile.units_count;
    clear<Sum>();
    for (std::size_t pair = first; pair < end; pair += pairs) {
      // Half a row of activations where a group has 16 columns.
      const std::byte* rows = x + pair / kPairs * width * kTileLine + pair % kPairs * 4;
      _tile_loadd(4, rows, kTileLine);
      _tile_loadd(5, tile.units + pair, kTileLine);
      multiply<Sum>();
    }
    store<Sum>(sums);
  }

  // A decoded tile for one panel: four groups at a time, whose sums then join the totals.
  static void from_tile(const Tile& tile, std::size_t first_column, std::size_t columns,
                        const DotPanel& panel, float* acc) {
    alignas(64) float sums[kSums][kMaxWidth * kRowsPerBlock];
    const auto width = static_cast<std::size_t>(panel.width);
    const std::byte* x = panel.data + first_column * width * sizeof(Bf16);
    const float* x_sums = SummedAmxPanel::sums(panel.data, columns, panel.width) +
                          first_column / kPanelColumns * width;
    for (std::size_t group = 0; group < tile.groups_count; group += kSums) {
      const std::size_t left = tile.groups_count - group;
      const std::size_t count = left < kSums ? left : kSums;
      group_sums<0>(tile, group, x, width, sums[0]);
      if (count > 1) group_sums<1>(tile, group + 1, x, width, sums[1]);
      if (count > 2) group_sums<2>(tile, group + 2, x, width, sums[2]);
      if (count > 3) group_sums<3>(tile, group + 3, x, width, sums[3]);
      for (std::size_t t = 0; t < width; ++t) {
        float* out = acc + t * kRowsPerBlock;
        __m512 total = first_column == 0 && group == 0 ? Isa::zero() : Isa::load(out);
        for (std::size_t i = 0; i < count; ++i) {
          const auto& scales = tile.scales[group + i];
          total = Isa::fma(scales.scale, Isa::load(sums[i] + t * kRowsPerBlock), total);
          if (!tile.has_minimum) continue;
          const float* x_sum = x_sums + (group + i) * tile.sums_per_group * width + t;
          float sum = x_sum[0];
          for (std::size_t j = 1; j < tile.sums_per_group; ++j) sum += x_sum[j * width];
          total = Isa::fma(scales.minimum, Isa::set1(-sum), total);
        }
        Isa::store(out, total);
      }
    }
  }

  // Whole tiles: the last columns of fp8_block may not fill one.
  static void pad(Tile& tile) {
    const std::size_t end = round_up(tile.units_count, kPairs);
    while (tile.units_count < end) tile.units[tile.units_count++] = _mm512_setzero_si512();
  }

  // Blocks for panels that are wide enough for tiles.
  template <WeightKind Kind>
  static void on_tiles(const WeightFormat& format, const std::byte* weights, int blocks,
                       std::size_t columns, const DotPanel* panels, int panels_count) {
    const std::size_t block_bytes = format.block_bytes(columns);
    std::size_t configured = 0;
    Tile tile;
    for (int block = 0; block < blocks; ++block, weights += block_bytes) {
      const Avx512Groups<Kind> groups(format, weights, columns);
      const std::size_t step = Decoded::prepare<Kind>(groups, tile);
      for (std::size_t group = 0; group < groups.count(); group += step) {
        Decoded::decode<Kind>(groups, group, step, tile);
        pad(tile);
        finish_writes();
        for (int i = 0; i < panels_count; ++i) {
          const auto width = static_cast<std::size_t>(panels[i].width);
          if (width != configured) {
            configure(width, groups.group_columns() < kPanelColumns ? groups.group_columns()
                                                                    : kPanelColumns);
          }
          configured = width;
          float* acc = panels[i].acc + static_cast<std::size_t>(block) * width * kRowsPerBlock;
          from_tile(tile, group * groups.group_columns(), columns, panels[i], acc);
        }
      }
    }
    // Tiles in use make every switch of threads save eight kilobytes.
    _tile_release();
  }

  // Panels are as wide as the first one; the last may be narrower.
  template <WeightKind Kind>
  static void blocks_of(const WeightFormat& format, const std::byte* weights, int blocks,
                        std::size_t columns, const DotPanel* panels, int panels_count) {
    int wide = 0;
    while (wide < panels_count && panels[wide].width > static_cast<int>(kNarrowWidth)) ++wide;
    if (wide > 0) on_tiles<Kind>(format, weights, blocks, columns, panels, wide);
    for (int i = wide; i < panels_count; ++i) {
      AmxNarrow::template blocks_of<Kind>(format, weights, blocks, columns, panels + i, 1);
    }
  }

  static void dot(const WeightFormat& format, const std::byte* weights, int blocks,
                  std::size_t columns, const DotPanel* panels, int panels_count) {
    with_kind(format.kind, [&](auto kind) {
      blocks_of<decltype(kind)::value>(format, weights, blocks, columns, panels, panels_count);
    });
  }

  static constexpr ProductKernels table() {
    return {.panel = {.bytes = SummedAmxPanel::bytes,
                      .pack = PanelBy32<SummedAmxPanel>::pack,
                      .put = PanelBy32<SummedAmxPanel>::put},
            .max_width = static_cast<int>(kMaxWidth),
            .dot = dot};
  }
};

}  // namespace
}  // namespace freetoken::exec
