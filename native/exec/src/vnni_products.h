// Products with eight-bit activations: vpdpbusd adds four products of an unsigned and a signed byte
// to each of 16 lanes (lane = row). Weights become unsigned by an offset, which the sum of the
// activations takes back. A sum over 16 or 32 columns is exact; scales are applied in singles, in
// the order of the columns.
//
// Isa: lanes of singles. Ints: the same lanes as integers. Groups<Kind>: where a block's groups and
// their scales lie.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels.h"
#include "layout.h"
#include "panel_by_32.h"
#include "stream_codes.h"
#include "vnni_panel.h"

namespace freetoken::exec {
namespace {

// step(at, sink) hands on unsigned bytes, value + kOffset, of four columns at a time.
template <class Ints, WeightKind Kind>
struct VnniCodes {
  // 4-bit codes: two's worth of four columns in a step of eight.
  static constexpr bool kE2m1 = Kind == WeightKind::kMxfp4 || Kind == WeightKind::kNvfp4;
  static constexpr QuadOrder kOrder = QuadOrder::kNibbles;
  static constexpr std::size_t kStepColumns = 8;
  static constexpr std::size_t kStepBytes = 64;
  static constexpr int kOffset = kE2m1 ? 12 : Kind == WeightKind::kInt4 ? 8 : 0;
  static constexpr float kScaleFactor = kE2m1 ? 0.5F : 1.0F;

  using I = typename Ints::I;
  // Twice the value of e2m1, plus 12.
  const I table =
      Ints::bytes16(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));

  template <class Sink>
  inline __attribute__((always_inline)) void step(const std::byte* at, const Sink& sink) const {
    const I codes = Ints::load(at);
    sink(Constant<0>{}, value(Ints::low_nibbles(codes)));
    sink(Constant<1>{}, value(Ints::low_nibbles(Ints::template right<4>(codes))));
  }

 private:
  inline __attribute__((always_inline)) I value(I nibbles) const {
    if constexpr (kE2m1) return Ints::lookup(table, nibbles);
    return nibbles;
  }
};

template <class Ints>
struct VnniCodes<Ints, WeightKind::kInt8> {
  static constexpr QuadOrder kOrder = QuadOrder::kPlain;
  static constexpr std::size_t kStepColumns = 4;
  static constexpr std::size_t kStepBytes = 64;
  static constexpr int kOffset = 128;
  static constexpr float kScaleFactor = 1.0F;

  template <class Sink>
  inline __attribute__((always_inline)) void step(const std::byte* at, const Sink& sink) const {
    sink(Constant<0>{}, Ints::flip_signs(Ints::load(at)));
  }
};

template <class Ints>
struct VnniCodes<Ints, WeightKind::kQ6K> {
  static constexpr QuadOrder kOrder = QuadOrder::kNibbles;
  static constexpr std::size_t kStepColumns = 16;
  static constexpr std::size_t kStepBytes = 192;
  static constexpr int kOffset = 32;
  static constexpr float kScaleFactor = 1.0F;
  using I = typename Ints::I;

  template <class Sink>
  inline __attribute__((always_inline)) void step(const std::byte* at, const Sink& sink) const {
    const I plane = Ints::load(at);
    const I first = Ints::load(at + 64);
    const I second = Ints::load(at + 128);
    sink(Constant<0>{}, Ints::with_bits_4_5(first, Ints::template right<-4>(plane)));
    sink(Constant<1>{},
         Ints::with_bits_4_5(Ints::template right<4>(first), Ints::template right<-2>(plane)));
    sink(Constant<2>{}, Ints::with_bits_4_5(second, plane));
    sink(Constant<3>{},
         Ints::with_bits_4_5(Ints::template right<4>(second), Ints::template right<2>(plane)));
  }
};

template <class Isa, class Ints, template <WeightKind> class Groups>
struct VnniProducts {
  using F = typename Isa::F;
  using I = typename Ints::I;
  static constexpr std::size_t kMaxWidth = Ints::kMaxWidth;
  // Row blocks that a call takes at once for several panels.
  static constexpr std::size_t kBlocksAtOnce = 4;
  // Sums that a token's products alternate between, to hide their latency; integers, so that their
  // number changes nothing.
  static constexpr std::size_t kChains = Ints::kChains;

  // What a part of a group (16 or 32 columns) adds to the totals.
  template <std::size_t Width, class Scales>
  static inline __attribute__((always_inline)) void add_part(const Scales& scales, bool has_minimum,
                                                             const I (&sums)[kChains][Width],
                                                             const float* x_scales,
                                                             const std::int32_t (&x_sums)[Width],
                                                             F (&total)[Width]) {
#pragma GCC unroll 8
    for (std::size_t t = 0; t < Width; ++t) {
      const F scale = Isa::mul(scales.scale, Isa::set1(x_scales[t]));
      I sum = sums[0][t];
      if constexpr (kChains == 2) sum = Ints::add(sum, sums[1][t]);
      total[t] = Isa::fma(scale, Ints::to_float(sum), total[t]);
    }
    if (!has_minimum) return;
#pragma GCC unroll 8
    for (std::size_t t = 0; t < Width; ++t) {
      const float sum = -x_scales[t] * static_cast<float>(x_sums[t]);
      total[t] = Isa::fma(scales.minimum, Isa::set1(sum), total[t]);
    }
  }

  // blocks: side by side; acc: [block][token][16].
  template <WeightKind Kind, std::size_t Blocks, std::size_t Width>
  static void direct(const WeightFormat& format, const std::byte* weights, std::size_t columns,
                     const std::byte* panel, float* acc) {
    using Codes = VnniCodes<Ints, Kind>;
    using Panel = VnniPanel<Isa, Ints, Codes::kOrder>;
    constexpr bool kHalves = Kind == WeightKind::kNvfp4 || Kind == WeightKind::kQ6K;
    constexpr std::size_t kPartColumns = kHalves ? 16 : 32;
    constexpr std::size_t kSteps = kPartColumns / Codes::kStepColumns;
    constexpr std::size_t kStepQuads = Codes::kStepColumns / 4;
    const std::size_t block_bytes = format.block_bytes(columns);
    const Groups<Kind> groups(format, weights, columns);
    const Codes codec{};
    const auto* x = reinterpret_cast<const std::int32_t*>(panel);
    const auto* x_scales =
        reinterpret_cast<const float*>(panel + Panel::scales_offset(columns, Width));
    const auto* sums =
        reinterpret_cast<const std::int32_t*>(panel + Panel::sums_offset(columns, Width));
    const std::size_t parts = groups.group_columns() / kPartColumns;
    F total[Blocks][Width];
#pragma GCC unroll 4
    for (auto& of_block : total) {
#pragma GCC unroll 8
      for (auto& of_token : of_block) of_token = Isa::zero();
    }
    for (std::size_t group = 0; group < groups.count(); ++group) {
      const std::byte* codes = groups.codes(group);
      for (std::size_t part = 0; part < parts; ++part) {
        std::int32_t x_sums[Width];
        I first_dots[Width];
#pragma GCC unroll 8
        for (std::size_t t = 0; t < Width; ++t) {
          x_sums[t] = kHalves ? sums[t] : sums[t] + sums[Width + t];
          first_dots[t] = Ints::set1(-Codes::kOffset * x_sums[t]);
        }
        sums += (kHalves ? 1 : 2) * Width;
#pragma GCC unroll 4
        for (std::size_t b = 0; b < Blocks; ++b) {
          I dots[kChains][Width];
#pragma GCC unroll 8
          for (std::size_t t = 0; t < Width; ++t) {
            dots[0][t] = first_dots[t];
            if constexpr (kChains == 2) dots[1][t] = Ints::set1(0);
          }
#pragma GCC unroll 8
          for (std::size_t step = 0; step < kSteps; ++step) {
            const std::byte* at = codes + b * block_bytes + step * Codes::kStepBytes;
#pragma GCC unroll 4
            for (std::size_t i = 0; i < Codes::kStepBytes; i += 64) {
              Isa::prefetch(at + i + kAheadBytes);
            }
            const std::int32_t* of_step = x + step * kStepQuads * Width;
            codec.step(
                at, [&](auto quad, I w) __attribute__((always_inline)) {
                  constexpr std::size_t kQuad = decltype(quad)::value;
#pragma GCC unroll 8
                  for (std::size_t t = 0; t < Width; ++t) {
                    I& sum = dots[(step * kStepQuads + kQuad) % kChains][t];
                    sum = Ints::dot(sum, w, of_step + kQuad * Width + t);
                  }
                });
          }
          auto scales = groups.scales(group, b * block_bytes);
          if constexpr (Codes::kScaleFactor != 1.0F) {
            scales.scale = Isa::mul(scales.scale, Isa::set1(Codes::kScaleFactor));
          }
          add_part<Width>(scales, groups.has_minimum(), dots, x_scales, x_sums, total[b]);
        }
        codes += kSteps * Codes::kStepBytes;
        x += kSteps * kStepQuads * Width;
        if (!kHalves || group % 2 == 1) x_scales += Width;
      }
    }
#pragma GCC unroll 4
    for (std::size_t b = 0; b < Blocks; ++b) {
#pragma GCC unroll 8
      for (std::size_t t = 0; t < Width; ++t) {
        Isa::store(acc + (b * Width + t) * kRowsPerBlock, total[b][t]);
      }
    }
  }

  // Blocks of 16 rows for the tokens of one panel.
  template <WeightKind Kind, std::size_t Width>
  static void one_panel(const WeightFormat& format, const std::byte* weights, std::size_t blocks,
                        std::size_t columns, const std::byte* panel, float* acc) {
    constexpr std::size_t kBlocks = Ints::blocks_at_once(Width);
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

  using OnePanel = void (*)(const WeightFormat&, const std::byte*, std::size_t, std::size_t,
                            const std::byte*, float*);
  template <WeightKind Kind, std::size_t... Index>
  static constexpr std::array<OnePanel, kMaxWidth> all_widths(std::index_sequence<Index...> /*i*/) {
    return {one_panel<Kind, Index + 1>...};
  }

  template <WeightKind Kind>
  static void dot(const WeightFormat& format, const std::byte* weights, int blocks,
                  std::size_t columns, const DotPanel* panels, int panels_count) {
    static constexpr auto kOnePanel = all_widths<Kind>(std::make_index_sequence<kMaxWidth>{});
    const std::size_t block_bytes = format.block_bytes(columns);
    // As many blocks as stay in the cache between two panels.
    const int step = panels_count == 1 ? blocks : static_cast<int>(kBlocksAtOnce);
    for (int block = 0; block < blocks; block += step) {
      const int count = blocks - block < step ? blocks - block : step;
      for (int i = 0; i < panels_count; ++i) {
        const auto width = static_cast<std::size_t>(panels[i].width);
        float* acc = panels[i].acc + static_cast<std::size_t>(block) * width * kRowsPerBlock;
        kOnePanel.data()[width - 1](format, weights, static_cast<std::size_t>(count), columns,
                                    panels[i].data, acc);
      }
      weights += static_cast<std::size_t>(count) * block_bytes;
    }
  }

  template <WeightKind Kind>
  static constexpr ProductKernels kernels() {
    using Panel = VnniPanel<Isa, Ints, VnniCodes<Ints, Kind>::kOrder>;
    return {.panel = {.bytes = Panel::bytes,
                      .pack = PanelBy32<Panel>::pack,
                      .put = PanelBy32<Panel>::put},
            .max_width = static_cast<int>(kMaxWidth),
            .dot = dot<Kind>};
  }

  template <WeightKind Kind>
  static void add(ProductTable& table) {
    static constexpr ProductKernels kKernels = kernels<Kind>();
    table.fast[static_cast<std::size_t>(Kind)] = &kKernels;
  }

  // The kinds that have a fast path.
  static void add_all(ProductTable& table) {
    add<WeightKind::kMxfp4>(table);
    add<WeightKind::kNvfp4>(table);
    add<WeightKind::kInt4>(table);
    add<WeightKind::kInt8>(table);
    add<WeightKind::kQ4K>(table);
    add<WeightKind::kQ6K>(table);
  }
};

}  // namespace
}  // namespace freetoken::exec
