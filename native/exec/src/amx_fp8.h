// Products of fp8_block on AMX tiles, and for a few tokens in the vector units, whose FMA needs
// less time than filling tiles does.
//
// A part of a block is decoded to bf16 pairs in the first-level cache, which lie there as tiles
// want them. Each group of columns is a product of its own; its sums, times the scale, join the
// totals in the order of the groups. tdpbf16ps adds the even and the odd columns of 32 apart, each
// by fused multiply-adds, then both to the sum; the vector units do the same, so that a sum depends
// on its token and row only. Subnormal activations count as zero in both. (A product below the
// normal numbers is zero in tiles only: it takes activations below 2^-116.)
#pragma once
#include <immintrin.h>

#include <cstddef>

#include "amx_tiles.h"
#include "avx512_bf16_codes.h"
#include "avx512_products.h"
#include "isa_avx512.h"
#include "isa_avx512_bf16.h"
#include "kernels.h"
#include "layout.h"
#include "panel_by_32.h"

namespace freetoken::exec {
namespace {

struct AmxNarrowIsa : Avx512Isa {
  static constexpr bool kSumsOf32 = true;

  static F load_activations(const Bf16* p) {
    const F values = load_bf16(p);
    const __m512i exponent =
        _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7f800000));
    return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(exponent, exponent), values);
  }
};

// Pairs of columns in bf16 as two columns of singles: fewer instructions than converting columns.
template <WeightKind Kind>
struct WidenedCodes {
  using Pairs = Avx512Bf16Codes<Kind>;
  static constexpr std::size_t kStepColumns = Pairs::kStepColumns;
  static constexpr std::size_t kStepBytes = Pairs::kStepBytes;
  static constexpr float kScaleFactor = Pairs::kScaleFactor;

  const Pairs pairs{};

  template <class Sink>
  inline __attribute__((always_inline)) void step(const std::byte* at, const Sink& sink) const {
    pairs.step(
        at, [&](auto unit, __m512i pair) __attribute__((always_inline)) {
          constexpr int kColumn = 2 * decltype(unit)::value;
          const __m512i odd = _mm512_and_si512(pair, _mm512_set1_epi32(-0x10000));
          sink(Constant<kColumn>{}, _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)));
          sink(Constant<kColumn + 1>{}, _mm512_castsi512_ps(odd));
        });
  }
};

struct AmxFp8 {
  static constexpr WeightKind kKind = WeightKind::kFp8Block;
  using Isa = Avx512Isa;
  using Narrow = Avx512Products<AmxNarrowIsa, WidenedCodes>;
  using Decoded = Avx512Products<Avx512Bf16Isa, Avx512Bf16Codes>;
  using Tile = Decoded::Tile;
  // Up to how many tokens are multiplied without tiles. (Measured on Sapphire Rapids.)
  static constexpr std::size_t kNarrowTokens = 2;
  static constexpr std::size_t kMaxWidth = 16;
  static constexpr std::size_t kPairs = kPanelColumns / 2;
  static constexpr std::size_t kSums = 2;  // groups of a tile, each with a tile of sums

  struct Panel {
    static std::size_t bytes(std::size_t columns, int width) {
      if (static_cast<std::size_t>(width) <= kNarrowTokens) {
        return Narrow::Panel::bytes(columns, width);
      }
      return AmxPanel::bytes(columns, width);
    }
    static void store(const Bf16* values, std::size_t index, std::size_t token, std::size_t width,
                      std::size_t columns, std::byte* panel) {
      if (width <= kNarrowTokens) {
        Narrow::Panel::store(values, index, token, width, columns, panel);
      } else {
        AmxPanel::store(values, index, token, width, columns, panel);
      }
    }
  };

  // Tiles 0 and 1: sums of two groups, [token][16]; 4: activations, 5: codes, of 32 columns.
  static void configure(std::size_t width) {
    TileConfig config;
    for (std::size_t tile = 0; tile < kSums; ++tile) config.set(tile, width, kTileLine);
    config.set(4, width, kTileLine);
    config.set(5, kPairs, kTileLine);
    config.load();
  }

  // Sums of one group of a tile, [token][16]. Names of tiles are part of the instructions.
  template <std::size_t Sum>
  static inline __attribute__((always_inline)) void group_sums(const Tile& tile, std::size_t group,
                                                               const std::byte* x,
                                                               std::size_t width, float* sums) {
    const std::size_t first = group * tile.group_units;
    const std::size_t whole = first + tile.group_units;
    const std::size_t end = whole < tile.units_count ? whole : tile.units_count;
    if constexpr (Sum == 0) _tile_zero(0);
    if constexpr (Sum == 1) _tile_zero(1);
    for (std::size_t pair = first; pair < end; pair += kPairs) {
      _tile_loadd(4, x + pair / kPairs * width * kTileLine, kTileLine);
      _tile_loadd(5, tile.units + pair, kTileLine);
      if constexpr (Sum == 0) _tile_dpbf16ps(0, 4, 5);
      if constexpr (Sum == 1) _tile_dpbf16ps(1, 4, 5);
    }
    if constexpr (Sum == 0) _tile_stored(0, sums, kTileLine);
    if constexpr (Sum == 1) _tile_stored(1, sums, kTileLine);
  }

  // A decoded tile for one panel; its sums join the totals.
  static void from_tile(const Tile& tile, std::size_t first_column, const DotPanel& panel,
                        float* acc) {
    alignas(64) float sums[kSums][kMaxWidth * kRowsPerBlock];
    const auto width = static_cast<std::size_t>(panel.width);
    const std::byte* x = panel.data + first_column * width * sizeof(Bf16);
    group_sums<0>(tile, 0, x, width, sums[0]);
    if (tile.groups_count > 1) group_sums<1>(tile, 1, x, width, sums[1]);
    for (std::size_t t = 0; t < width; ++t) {
      float* out = acc + t * kRowsPerBlock;
      __m512 total = first_column == 0 ? Isa::zero() : Isa::load(out);
      for (std::size_t i = 0; i < tile.groups_count; ++i) {
        total = Isa::fma(tile.scales[i].scale, Isa::load(sums[i] + t * kRowsPerBlock), total);
      }
      Isa::store(out, total);
    }
  }

  // Whole tiles: the last columns may not fill one.
  static void pad(Tile& tile) {
    const std::size_t end = round_up(tile.units_count, kPairs);
    while (tile.units_count < end) tile.units[tile.units_count++] = _mm512_setzero_si512();
  }

  static void on_tiles(const WeightFormat& format, const std::byte* weights, int blocks,
                       std::size_t columns, const DotPanel* panels, int panels_count) {
    static_assert(Decoded::kTileColumns == kSums * kFp8BlockColumns);
    const std::size_t block_bytes = format.block_bytes(columns);
    std::size_t configured = 0;
    Tile tile;
    for (int block = 0; block < blocks; ++block, weights += block_bytes) {
      const Avx512Groups<kKind> groups(format, weights, columns);
      Decoded::prepare<kKind>(groups, tile);
      for (std::size_t group = 0; group < groups.count(); group += kSums) {
        Decoded::decode<kKind>(groups, group, kSums, tile);
        pad(tile);
        finish_writes();
        for (int i = 0; i < panels_count; ++i) {
          const auto width = static_cast<std::size_t>(panels[i].width);
          if (width != configured) configure(width);
          configured = width;
          float* acc = panels[i].acc + static_cast<std::size_t>(block) * width * kRowsPerBlock;
          from_tile(tile, group * kFp8BlockColumns, panels[i], acc);
        }
      }
    }
    // Tiles in use make every switch of threads save eight kilobytes.
    _tile_release();
  }

  // Panels are as wide as the first one; the last may be narrower.
  static void dot(const WeightFormat& format, const std::byte* weights, int blocks,
                  std::size_t columns, const DotPanel* panels, int panels_count) {
    int wide = 0;
    while (wide < panels_count && panels[wide].width > static_cast<int>(kNarrowTokens)) ++wide;
    if (wide > 0) on_tiles(format, weights, blocks, columns, panels, wide);
    for (int i = wide; i < panels_count; ++i) {
      Narrow::blocks_of<kKind>(format, weights, blocks, columns, panels + i, 1);
    }
  }

  static constexpr ProductKernels table() {
    return {.panel = {.bytes = Panel::bytes,
                      .pack = PanelBy32<Panel>::pack,
                      .put = PanelBy32<Panel>::put},
            .max_width = static_cast<int>(kMaxWidth),
            .dot = dot};
  }
};

}  // namespace
}  // namespace freetoken::exec
