// Products of three-digit activations (vnni_panel.h) on AMX tiles: the integers of vnni_products.h,
// for many tokens. Weights are signed here, so that nothing has to be taken back; integers are
// exact, and scales are applied as there, so that both give the same bits.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "amx_tiles.h"
#include "avx512_groups.h"
#include "avx512_vnni.h"
#include "isa_avx512.h"
#include "kernels.h"
#include "layout.h"
#include "panel_by_32.h"
#include "vnni_products.h"

namespace freetoken::exec {
namespace {

// Up to how many tokens are multiplied without tiles. (Measured on Sapphire Rapids.)
inline constexpr std::size_t kNarrowTokens = 6;

// [32 columns][digit][token][32] bytes, then [32 columns][token] scales, then [32 columns][token]
// sums of the integers, two for two halves; narrow ones are VnniPanel's.
template <QuadOrder Order>
struct DigitsPanel {
  using Isa = Avx512Isa;
  using Narrow = VnniPanel<Isa, Avx512Ints, Order, ThreeDigits>;
  static constexpr std::size_t kDigits = ThreeDigits::kDigits;

  static std::size_t digits_bytes(std::size_t width) { return width * kPanelColumns; }
  static std::size_t scales_offset(std::size_t columns, std::size_t width) {
    return round_up(columns, kPanelColumns) * width * kDigits;
  }
  static std::size_t sums_offset(std::size_t columns, std::size_t width) {
    return scales_offset(columns, width) + ceil_div(columns, kPanelColumns) * width * sizeof(float);
  }
  static std::size_t bytes(std::size_t columns, int width) {
    const auto tokens = static_cast<std::size_t>(width);
    if (tokens <= kNarrowTokens) return Narrow::bytes(columns, width);
    return sums_offset(columns, tokens) +
           ceil_div(columns, kPanelColumns) * tokens * sizeof(std::int32_t);
  }

  static void store(const Bf16* values, std::size_t index, std::size_t token, std::size_t width,
                    std::size_t columns, std::byte* panel) {
    if (width <= kNarrowTokens) {
      Narrow::store(values, index, token, width, columns, panel);
      return;
    }
    ByteParts<kDigits> parts;
    const float scale = Narrow::digits_of(values, parts);
    std::int32_t sum = 0;
    std::byte* out = panel + index * kDigits * digits_bytes(width) + token * kPanelColumns;
    for (std::size_t d = kDigits; d-- > 0;) {
      std::byte* row = out + d * digits_bytes(width);
      for (std::size_t half = 0; half < 2; ++half) {
        const __m128i bytes = parts.bytes[half][d];
        _mm_storeu_si128(reinterpret_cast<__m128i*>(row + 16 * half), Narrow::ordered(bytes));
      }
      sum = sum * 256 + Narrow::sum(parts.bytes[0][d]) + Narrow::sum(parts.bytes[1][d]);
    }
    auto* scales = reinterpret_cast<float*>(panel + scales_offset(columns, width));
    scales[index * width + token] = scale;
    auto* sums = reinterpret_cast<std::int32_t*>(panel + sums_offset(columns, width));
    sums[index * width + token] = sum;
  }
};

template <WeightKind Kind>
struct AmxDigits {
  using Isa = Avx512Isa;
  using Codes = VnniCodes<Avx512Ints, Kind>;
  using Panel = DigitsPanel<Codes::kOrder>;
  using Narrow = VnniProducts<Isa, Avx512Ints, Avx512Groups, ThreeDigits>;
  using Scales = RowScales<Isa>;
  static constexpr std::size_t kMaxWidth = 16;
  static constexpr bool kHalves = Narrow::template halves<Kind>();
  static constexpr std::size_t kPartColumns = kHalves ? 16 : 32;
  static constexpr std::size_t kPartQuads = kPartColumns / 4;
  static constexpr std::size_t kParts = 4;  // decoded at a time

  // Parts of a block: [quad][row] four signed bytes, and their scales.
  struct Decoded {
    alignas(64) __m512i quads[kParts * kPartQuads];
    Scales scales[kParts];
  };

  // Tiles 0-2 and 3-5: sums of the digits of two parts, [token][16]; 6: activations, 7: weights.
  static void configure(std::size_t width) {
    TileConfig config;
    for (std::size_t tile = 0; tile < 6; ++tile) config.set(tile, width, kTileLine);
    config.set(6, width, kPartColumns);
    config.set(7, kPartQuads, kTileLine);
    config.load();
  }

  // Parts [first, first + count) of a block, whose groups have parts_per_group.
  static void decode(const Avx512Groups<Kind>& groups, std::size_t parts_per_group,
                     std::size_t first, std::size_t count, Decoded& out) {
    const Codes codec{};
    const __m512i offset = _mm512_set1_epi8(static_cast<char>(Codes::kOffset));
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t group = (first + i) / parts_per_group;
      const std::size_t within = (first + i) % parts_per_group;
      out.scales[i] = groups.scales(group);
      if constexpr (Codes::kScaleFactor != 1.0F) {
        out.scales[i].scale = Isa::mul(out.scales[i].scale, Isa::set1(Codes::kScaleFactor));
      }
      constexpr std::size_t kSteps = kPartColumns / Codes::kStepColumns;
      constexpr std::size_t kStepQuads = Codes::kStepColumns / 4;
      const std::byte* codes = groups.codes(group) + within * kSteps * Codes::kStepBytes;
      __m512i* quads = out.quads + i * kPartQuads;
#pragma GCC unroll 8
      for (std::size_t step = 0; step < kSteps; ++step) {
        for (std::size_t line = 0; line < Codes::kStepBytes; line += 64) {
          Isa::prefetch(codes + line + kAheadBytes);
        }
        codec.step(
            codes, [&](auto quad, __m512i w) __attribute__((always_inline)) {
              quads[decltype(quad)::value] = _mm512_sub_epi8(w, offset);
            });
        codes += Codes::kStepBytes;
        quads += kStepQuads;
      }
    }
  }

  // Names of tiles are part of the instructions.
  template <bool Second>
  static inline __attribute__((always_inline)) void part_sums(const __m512i* quads,
                                                              const std::byte* x,
                                                              std::size_t digit_bytes,
                                                              std::int32_t (*sums)[256]) {
    _tile_loadd(7, quads, kTileLine);
    if constexpr (Second) {
      _tile_zero(3);
      _tile_zero(4);
      _tile_zero(5);
      _tile_loadd(6, x, kPanelColumns);
      _tile_dpbssd(3, 6, 7);
      _tile_loadd(6, x + digit_bytes, kPanelColumns);
      _tile_dpbssd(4, 6, 7);
      _tile_loadd(6, x + 2 * digit_bytes, kPanelColumns);
      _tile_dpbssd(5, 6, 7);
      _tile_stored(3, sums[0], kTileLine);
      _tile_stored(4, sums[1], kTileLine);
      _tile_stored(5, sums[2], kTileLine);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_loadd(6, x, kPanelColumns);
      _tile_dpbssd(0, 6, 7);
      _tile_loadd(6, x + digit_bytes, kPanelColumns);
      _tile_dpbssd(1, 6, 7);
      _tile_loadd(6, x + 2 * digit_bytes, kPanelColumns);
      _tile_dpbssd(2, 6, 7);
      _tile_stored(0, sums[0], kTileLine);
      _tile_stored(1, sums[1], kTileLine);
      _tile_stored(2, sums[2], kTileLine);
    }
  }

  // Adds the sums of `count` parts to a token's totals.
  static void add_parts(const Decoded& decoded, std::size_t count, bool has_minimum,
                        const std::int32_t (*sums)[3][256], const float* const* x_scales,
                        const std::int32_t* const* x_sums, std::size_t t, float* acc) {
    __m512 total = Isa::load(acc);
    for (std::size_t part = 0; part < count; ++part) {
      const __m512i digits[3] = {_mm512_load_si512(sums[part][0] + t * kRowsPerBlock),
                                 _mm512_load_si512(sums[part][1] + t * kRowsPerBlock),
                                 _mm512_load_si512(sums[part][2] + t * kRowsPerBlock)};
      const Scales& scales = decoded.scales[part];
      const float x_scale = x_scales[part][t];
      const __m512 scale = Isa::mul(scales.scale, Isa::set1(x_scale));
      total = Isa::fma(scale, Narrow::value(digits), total);
      if (has_minimum) {
        const float sum = -x_scale * static_cast<float>(x_sums[part][t]);
        total = Isa::fma(scales.minimum, Isa::set1(sum), total);
      }
    }
    Isa::store(acc, total);
  }

  // Decoded parts for one panel; the first of them is number `first` of the block.
  static void from_decoded(const Decoded& decoded, std::size_t first, std::size_t count,
                           bool has_minimum, std::size_t columns, const DotPanel& panel,
                           float* acc) {
    alignas(64) std::int32_t sums[kParts][3][kMaxWidth * kRowsPerBlock];
    const auto width = static_cast<std::size_t>(panel.width);
    const std::size_t digit_bytes = Panel::digits_bytes(width);
    const float* x_scales[kParts];
    const std::int32_t* x_sums[kParts];
    for (std::size_t part = 0; part < count; ++part) {
      const std::size_t column = (first + part) * kPartColumns;
      const std::size_t index = column / kPanelColumns;
      const std::byte* x = panel.data + index * 3 * digit_bytes + column % kPanelColumns;
      if (part % 2 == 0) {
        part_sums<false>(decoded.quads + part * kPartQuads, x, digit_bytes, sums[part]);
      } else {
        part_sums<true>(decoded.quads + part * kPartQuads, x, digit_bytes, sums[part]);
      }
      x_scales[part] =
          reinterpret_cast<const float*>(panel.data + Panel::scales_offset(columns, width)) +
          index * width;
      x_sums[part] =
          reinterpret_cast<const std::int32_t*>(panel.data + Panel::sums_offset(columns, width)) +
          index * width;
    }
    finish_writes();
    for (std::size_t t = 0; t < width; ++t, acc += kRowsPerBlock) {
      add_parts(decoded, count, has_minimum, sums, x_scales, x_sums, t, acc);
    }
  }

  // Columns go round outside, blocks inside: the activations of a few columns stay in the
  // first-level cache, where filling tiles from the second takes longer than multiplying them.
  static void on_tiles(const WeightFormat& format, const std::byte* weights, int blocks,
                       std::size_t columns, const DotPanel* panels, int panels_count) {
    const std::size_t block_bytes = format.block_bytes(columns);
    const std::size_t all = columns / kPartColumns;
    std::size_t configured = 0;
    Decoded decoded;
    for (std::size_t first = 0; first < all; first += kParts) {
      const std::size_t count = all - first < kParts ? all - first : kParts;
      for (int block = 0; block < blocks; ++block) {
        const Avx512Groups<Kind> groups(
            format, weights + static_cast<std::size_t>(block) * block_bytes, columns);
        decode(groups, groups.group_columns() / kPartColumns, first, count, decoded);
        finish_writes();
        for (int i = 0; i < panels_count; ++i) {
          const auto width = static_cast<std::size_t>(panels[i].width);
          if (width != configured) configure(width);
          configured = width;
          float* acc = panels[i].acc + static_cast<std::size_t>(block) * width * kRowsPerBlock;
          if (first == 0) std::memset(acc, 0, width * kRowsPerBlock * sizeof(float));
          from_decoded(decoded, first, count, groups.has_minimum(), columns, panels[i], acc);
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
    if (wide == panels_count) return;
    Narrow::template dot<Kind>(format, weights, blocks, columns, panels + wide,
                               panels_count - wide);
  }

  static constexpr ProductKernels kKernels = {.panel = {.bytes = Panel::bytes,
                                                        .pack = PanelBy32<Panel>::pack,
                                                        .put = PanelBy32<Panel>::put},
                                              .max_width = static_cast<int>(kMaxWidth),
                                              .dot = dot};
};

inline void add_amx_digits(ProductTable& table) {
  const auto set = [&table](WeightKind kind, const ProductKernels& products) {
    table.exact[static_cast<std::size_t>(kind)] = &products;
  };
  set(WeightKind::kMxfp4, AmxDigits<WeightKind::kMxfp4>::kKernels);
  set(WeightKind::kNvfp4, AmxDigits<WeightKind::kNvfp4>::kKernels);
  set(WeightKind::kInt4, AmxDigits<WeightKind::kInt4>::kKernels);
  set(WeightKind::kInt8, AmxDigits<WeightKind::kInt8>::kKernels);
  set(WeightKind::kQ4K, AmxDigits<WeightKind::kQ4K>::kKernels);
  set(WeightKind::kQ6K, AmxDigits<WeightKind::kQ6K>::kKernels);
}

}  // namespace
}  // namespace freetoken::exec
