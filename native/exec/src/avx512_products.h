// Products with bf16 activations of the formats with scales, on AVX-512.
//
// A register of decoded codes ("unit") is one column of 16 rows in singles, or a pair of columns in
// bf16. Within a group the even and the odd units have a sum each; at the group's end both, times
// the scale, join the row's total. A tile of many tokens is decoded into the first-level cache once
// and read from there for every panel; one panel takes the codes from the registers they were
// decoded in. Both add the same numbers in the same order.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstring>

#include "avx512_groups.h"
#include "format_bf16.h"
#include "kernels.h"
#include "layout.h"
#include "panel_by_32.h"
#include "stream_codes.h"

namespace freetoken::exec {
namespace {

// [unit][token] activations as Isa multiplies them, then [32 columns][token] their sums. Columns
// are padded with zeros to a multiple of 32.
template <class Isa>
struct UnitPanel {
  using Activation = typename Isa::Activation;
  static constexpr std::size_t kUnitColumns = Isa::kSteps == 2 ? 1 : 2;
  static constexpr std::size_t kUnits = kPanelColumns / kUnitColumns;  // of 32 columns

  static std::size_t sums_offset(std::size_t columns, std::size_t width) {
    return round_up(columns, kPanelColumns) / kUnitColumns * width * sizeof(Activation);
  }

  static std::size_t bytes(std::size_t columns, int width) {
    const auto tokens = static_cast<std::size_t>(width);
    return sums_offset(columns, tokens) + ceil_div(columns, kPanelColumns) * tokens * sizeof(float);
  }

  // Columns [32 index, + 32) of one token.
  static void store(const Bf16* values, std::size_t index, std::size_t token, std::size_t width,
                    std::size_t columns, std::byte* panel) {
    Activation units[kUnits];
    if constexpr (kUnitColumns == 1) {
      Isa::store(units, Isa::load_activations(values));
      Isa::store(units + 16, Isa::load_activations(values + 16));
    } else {
      std::memcpy(units, values, sizeof units);
    }
    auto* out = reinterpret_cast<Activation*>(panel) + index * kUnits * width + token;
    for (std::size_t i = 0; i < kUnits; ++i) out[i * width] = units[i];
    auto* sums = reinterpret_cast<float*>(panel + sums_offset(columns, width));
    sums[index * width + token] =
        Isa::reduce_add(Isa::add(Isa::load_bf16(values), Isa::load_bf16(values + 16)));
  }
};

// Isa: Avx512Isa or one derived from it; Codes<Kind>: its decoding of a kind's codes.
template <class Isa, template <WeightKind> class Codes>
struct Avx512Products {
  using F = typename Isa::F;
  using W = typename Isa::W;
  using Activation = typename Isa::Activation;
  using Panel = UnitPanel<Isa>;
  using Scales = RowScales<Avx512Isa>;
  static constexpr std::size_t kUnitColumns = Panel::kUnitColumns;
  static constexpr std::size_t kMaxWidth = 8;  // 16 sums within a group, 8 totals
  // Columns of a decoded tile: 8 or 16 KiB, which leaves room for the activations.
  static constexpr std::size_t kTileColumns = 256;
  static constexpr std::size_t kTileGroups = kTileColumns / 16;

  struct Tile {
    alignas(64) W units[kTileColumns / kUnitColumns];
    Scales scales[kTileGroups];
    std::size_t groups_count;
    std::size_t group_units;  // of every group but the last
    std::size_t units_count;
    bool has_minimum;
    std::size_t sums_per_group;
  };

  // total <- total + scale * sum of the group - minimum * sum of its activations
  template <std::size_t Width>
  static inline __attribute__((always_inline)) void add_group(
      const Scales& scales, const F (&sum)[Width], bool has_minimum, std::size_t sums_per_group,
      const float* sums, F (&total)[Width]) {
#pragma GCC unroll 8
    for (std::size_t t = 0; t < Width; ++t) total[t] = Isa::fma(scales.scale, sum[t], total[t]);
    if (!has_minimum) return;
#pragma GCC unroll 8
    for (std::size_t t = 0; t < Width; ++t) {
      float x_sum = sums[t];
      for (std::size_t i = 1; i < sums_per_group; ++i) x_sum += sums[i * Width + t];
      total[t] = Isa::fma(scales.minimum, Isa::set1(-x_sum), total[t]);
    }
  }

  // Of a group, or of 32 columns of it: even and odd units together.
  template <std::size_t Width>
  static inline __attribute__((always_inline)) void join(const F (&part)[2][Width],
                                                         F (&sum)[Width]) {
#pragma GCC unroll 8
    for (std::size_t t = 0; t < Width; ++t) sum[t] = Isa::add(part[0][t], part[1][t]);
  }

  template <std::size_t Width>
  static inline __attribute__((always_inline)) void clear(F (&sums)[Width]) {
#pragma GCC unroll 8
    for (std::size_t t = 0; t < Width; ++t) sums[t] = Isa::zero();
  }

  template <WeightKind Kind>
  static inline __attribute__((always_inline)) Scales scales_of(const Avx512Groups<Kind>& groups,
                                                                std::size_t group,
                                                                std::size_t offset_bytes = 0) {
    Scales scales = groups.scales(group, offset_bytes);
    if constexpr (Codes<Kind>::kScaleFactor != 1.0F) {
      scales.scale = Isa::mul(scales.scale, Isa::set1(Codes<Kind>::kScaleFactor));
    }
    return scales;
  }

  template <std::size_t Bytes>
  static inline __attribute__((always_inline)) void prefetch(const std::byte* codes,
                                                             std::size_t ahead = kAheadBytes) {
#pragma GCC unroll 4
    for (std::size_t i = 0; i < Bytes; i += 64) Isa::prefetch(codes + i + ahead);
  }

  // Row blocks that one panel's products take side by side. A core reads several streams faster
  // than one, and the sums of a single token would wait for each other.
  static constexpr std::size_t blocks_at_once(std::size_t width) {
    return width == 1 ? 4 : width <= 3 ? 2 : 1;
  }

  // Blocks for one panel; acc: [block][token][16].
  template <WeightKind Kind, std::size_t Blocks, std::size_t Width>
  static void direct(const WeightFormat& format, const std::byte* weights, std::size_t columns,
                     const std::byte* panel, float* acc) {
    constexpr std::size_t kStepUnits = Codes<Kind>::kStepColumns / kUnitColumns;
    constexpr bool kParts = Isa::kSumsOf32 && Kind == WeightKind::kFp8Block;
    const std::size_t block_bytes = format.block_bytes(columns);
    const Avx512Groups<Kind> groups(format, weights, columns);
    const Codes<Kind> codec{};
    const auto* x = reinterpret_cast<const Activation*>(panel);
    const auto* sums = reinterpret_cast<const float*>(panel + Panel::sums_offset(columns, Width));
    const std::size_t sums_per_group = groups.group_columns() / kPanelColumns;
    F total[Blocks][Width];
#pragma GCC unroll 4
    for (auto& of_block : total) clear<Width>(of_block);
    for (std::size_t group = 0; group < groups.count(); ++group) {
      F sum[Blocks][Width];
      const std::byte* codes = groups.codes(group);
      const std::size_t ahead =
          ahead_bytes(static_cast<std::size_t>(codes - weights), block_bytes, Blocks);
      std::size_t left = ceil_div(groups.columns(group), Codes<Kind>::kStepColumns);
      bool first = true;
      do {
        std::size_t steps = left;
        if constexpr (kParts) {
          constexpr std::size_t kMost = kPanelColumns / Codes<Kind>::kStepColumns;
          steps = left < kMost ? left : kMost;
        }
        F part[Blocks][2][Width];
#pragma GCC unroll 4
        for (auto& of_block : part) {
          clear<Width>(of_block[0]);
          clear<Width>(of_block[1]);
        }
        left -= steps;
        do {
#pragma GCC unroll 4
          for (std::size_t b = 0; b < Blocks; ++b) {
            const std::byte* at = codes + b * block_bytes;
            prefetch<Codes<Kind>::kStepBytes>(at, ahead);
            codec.step(
                at, [&](auto unit, W w) __attribute__((always_inline)) {
                  constexpr std::size_t kUnit = decltype(unit)::value;
#pragma GCC unroll 8
                  for (std::size_t t = 0; t < Width; ++t) {
                    F& add = part[b][kUnit % 2][t];
                    add = Isa::accumulate(add, w, x + kUnit * Width + t);
                  }
                });
          }
          codes += Codes<Kind>::kStepBytes;
          x += kStepUnits * Width;
        } while (--steps != 0);
#pragma GCC unroll 4
        for (std::size_t b = 0; b < Blocks; ++b) {
          F joined[Width];
          join<Width>(part[b], joined);
#pragma GCC unroll 8
          for (std::size_t t = 0; t < Width; ++t) {
            sum[b][t] = first ? joined[t] : Isa::add(sum[b][t], joined[t]);
          }
        }
        first = false;
      } while (kParts && left != 0);
#pragma GCC unroll 4
      for (std::size_t b = 0; b < Blocks; ++b) {
        add_group<Width>(scales_of<Kind>(groups, group, b * block_bytes), sum[b],
                         groups.has_minimum(), sums_per_group, sums, total[b]);
      }
      sums += sums_per_group * Width;
    }
#pragma GCC unroll 4
    for (std::size_t b = 0; b < Blocks; ++b) {
#pragma GCC unroll 8
      for (std::size_t t = 0; t < Width; ++t) {
        Isa::store(acc + (b * Width + t) * kRowsPerBlock, total[b][t]);
      }
    }
  }

  // What every part of a block has in common; returns the number of groups that fit.
  template <WeightKind Kind>
  static std::size_t prepare(const Avx512Groups<Kind>& groups, Tile& tile) {
    tile.group_units = groups.group_columns() / kUnitColumns;
    tile.has_minimum = groups.has_minimum();
    tile.sums_per_group = groups.group_columns() / kPanelColumns;
    return kTileColumns / groups.group_columns();
  }

  // As many groups from `first` on as there are, and at most groups_step.
  template <WeightKind Kind>
  static void decode(const Avx512Groups<Kind>& groups, std::size_t first, std::size_t groups_step,
                     Tile& tile) {
    const std::size_t left = groups.count() - first;
    tile.groups_count = left < groups_step ? left : groups_step;
    constexpr std::size_t kStepUnits = Codes<Kind>::kStepColumns / kUnitColumns;
    const Codes<Kind> codec{};
    W* units = tile.units;
    for (std::size_t i = 0; i < tile.groups_count; ++i) {
      tile.scales[i] = scales_of<Kind>(groups, first + i);
      const std::byte* codes = groups.codes(first + i);
      const std::size_t steps = ceil_div(groups.columns(first + i), Codes<Kind>::kStepColumns);
      for (std::size_t step = 0; step < steps; ++step) {
        prefetch<Codes<Kind>::kStepBytes>(codes);
        codec.step(
            codes, [&](auto unit, W w)
                       __attribute__((always_inline)) { units[decltype(unit)::value] = w; });
        codes += Codes<Kind>::kStepBytes;
        units += kStepUnits;
      }
    }
    tile.units_count = static_cast<std::size_t>(units - tile.units);
  }

  // A decoded tile for one panel; its columns begin at first_column.
  template <std::size_t Width>
  static void from_tile(const Tile& tile, std::size_t first_column, std::size_t columns,
                        const std::byte* panel, float* acc) {
    const auto* x =
        reinterpret_cast<const Activation*>(panel) + first_column / kUnitColumns * Width;
    const auto* sums = reinterpret_cast<const float*>(panel + Panel::sums_offset(columns, Width)) +
                       first_column / kPanelColumns * Width;
    F total[Width];
#pragma GCC unroll 8
    for (std::size_t t = 0; t < Width; ++t) {
      total[t] = first_column == 0 ? Isa::zero() : Isa::load(acc + t * kRowsPerBlock);
    }
    const W* units = tile.units;
    const W* tile_end = units + tile.units_count;
    for (std::size_t group = 0; group < tile.groups_count; ++group) {
      F part[2][Width];
      clear<Width>(part[0]);
      clear<Width>(part[1]);
      const W* end = group + 1 < tile.groups_count ? units + tile.group_units : tile_end;
      for (; units != end; units += 2, x += 2 * Width) {
#pragma GCC unroll 8
        for (std::size_t t = 0; t < Width; ++t) {
          part[0][t] = Isa::accumulate(part[0][t], units[0], x + t);
        }
#pragma GCC unroll 8
        for (std::size_t t = 0; t < Width; ++t) {
          part[1][t] = Isa::accumulate(part[1][t], units[1], x + Width + t);
        }
      }
      F sum[Width];
      join<Width>(part, sum);
      add_group<Width>(tile.scales[group], sum, tile.has_minimum, tile.sums_per_group, sums, total);
      sums += tile.sums_per_group * Width;
    }
#pragma GCC unroll 8
    for (std::size_t t = 0; t < Width; ++t) Isa::store(acc + t * kRowsPerBlock, total[t]);
  }

  using FromTile = void (*)(const Tile&, std::size_t, std::size_t, const std::byte*, float*);
  static constexpr FromTile kFromTile[kMaxWidth] = {from_tile<1>, from_tile<2>, from_tile<3>,
                                                    from_tile<4>, from_tile<5>, from_tile<6>,
                                                    from_tile<7>, from_tile<8>};

  // One block for several panels.
  template <WeightKind Kind>
  static void tiled(const WeightFormat& format, const std::byte* weights, int block,
                    std::size_t columns, const DotPanel* panels, int panels_count) {
    const Avx512Groups<Kind> groups(format, weights, columns);
    Tile tile;
    const std::size_t groups_step = prepare<Kind>(groups, tile);
    for (std::size_t group = 0; group < groups.count(); group += groups_step) {
      decode<Kind>(groups, group, groups_step, tile);
      for (int i = 0; i < panels_count; ++i) {
        const DotPanel& panel = panels[i];
        float* acc = panel.acc + static_cast<std::size_t>(block * panel.width) * kRowsPerBlock;
        kFromTile[panel.width - 1](tile, group * groups.group_columns(), columns, panel.data, acc);
      }
    }
  }

  // All blocks for one panel.
  template <WeightKind Kind, std::size_t Width>
  static void one_panel(const WeightFormat& format, const std::byte* weights, std::size_t blocks,
                        std::size_t columns, const std::byte* panel, float* acc) {
    constexpr std::size_t kBlocks = blocks_at_once(Width);
    const std::size_t block_bytes = format.block_bytes(columns);
    for (; blocks >= kBlocks; blocks -= kBlocks) {
      direct<Kind, kBlocks, Width>(format, weights, columns, panel, acc);
      weights += kBlocks * block_bytes;
      acc += kBlocks * Width * kRowsPerBlock;
    }
    if constexpr (kBlocks == 1) return;
    for (; blocks > 0; --blocks) {
      direct<Kind, 1, Width>(format, weights, columns, panel, acc);
      weights += block_bytes;
      acc += Width * kRowsPerBlock;
    }
  }

  template <WeightKind Kind>
  static void blocks_of(const WeightFormat& format, const std::byte* weights, int blocks,
                        std::size_t columns, const DotPanel* panels, int panels_count) {
    using OnePanel = void (*)(const WeightFormat&, const std::byte*, std::size_t, std::size_t,
                              const std::byte*, float*);
    static constexpr OnePanel kOnePanel[kMaxWidth] = {
        one_panel<Kind, 1>, one_panel<Kind, 2>, one_panel<Kind, 3>, one_panel<Kind, 4>,
        one_panel<Kind, 5>, one_panel<Kind, 6>, one_panel<Kind, 7>, one_panel<Kind, 8>};
    if (panels_count == 1) {
      const auto width = static_cast<std::size_t>(panels[0].width);
      kOnePanel[width - 1](format, weights, static_cast<std::size_t>(blocks), columns,
                           panels[0].data, panels[0].acc);
      return;
    }
    const std::size_t block_bytes = format.block_bytes(columns);
    for (int block = 0; block < blocks; ++block, weights += block_bytes) {
      tiled<Kind>(format, weights, block, columns, panels, panels_count);
    }
  }

  static void dot(const WeightFormat& format, const std::byte* weights, int blocks,
                  std::size_t columns, const DotPanel* panels, int panels_count) {
    with_kind(format.kind, [&](auto kind) {
      blocks_of<decltype(kind)::value>(format, weights, blocks, columns, panels, panels_count);
    });
  }

  static constexpr ProductKernels table() {
    return {.panel = {.bytes = Panel::bytes,
                      .pack = PanelBy32<Panel>::pack,
                      .put = PanelBy32<Panel>::put},
            .max_width = static_cast<int>(kMaxWidth),
            .dot = dot};
  }
};

// bf16 weights and all others, with bf16 activations.
template <class Isa, template <WeightKind> class Codes>
const ProductTable& avx512_table() {
  static constexpr ProductKernels kBf16Products = Bf16Format<Isa>::table();
  static constexpr ProductKernels kProducts = Avx512Products<Isa, Codes>::table();
  static constexpr ProductTable kTable = [] {
    ProductTable table{};
    for (auto& entry : table.exact) entry = &kProducts;
    table.exact[static_cast<std::size_t>(WeightKind::kBf16)] = &kBf16Products;
    return table;
  }();
  return kTable;
}

}  // namespace
}  // namespace freetoken::exec
