// Products of integers: vpdpbusd adds four products of an unsigned and a signed byte to each of 16
// lanes (lane = row). Weights become unsigned by an offset, which the sum of the activations takes
// back; activations are one byte (numerics "fast") or three ("exact", see vnni_panel.h). A sum over
// 16 or 32 columns is exact; scales are applied in singles, in the order of the columns.
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

template <class Isa, class Ints, template <WeightKind> class Groups, class Digits>
struct VnniProducts {
  using F = typename Isa::F;
  using I = typename Ints::I;
  static constexpr std::size_t kDigits = Digits::kDigits;
  static constexpr std::size_t kMaxWidth = Ints::max_width(kDigits);
  // Row blocks that a call takes at once for several panels.
  static constexpr std::size_t kBlocksAtOnce = 4;
  // Sums that a digit's products alternate between, to hide their latency; integers, so that their
  // number changes nothing.
  static constexpr std::size_t kChains = Ints::chains(kDigits);

  // Kinds whose groups have 16 columns.
  template <WeightKind Kind>
  static constexpr bool halves() {
    return Kind == WeightKind::kNvfp4 || Kind == WeightKind::kQ6K;
  }

  // One part of a group (16 or 32 columns) for a panel.
  template <std::size_t Width>
  struct Part {
    std::int32_t x_sums[Width][kDigits];

    explicit Part(const std::int32_t* sums, std::size_t halves) {
#pragma GCC unroll 8
      for (std::size_t t = 0; t < Width; ++t) {
#pragma GCC unroll 3
        for (std::size_t d = 0; d < kDigits; ++d) {
          const std::int32_t* first = sums + d * Width + t;
          x_sums[t][d] = halves == 1 ? first[0] : first[0] + first[kDigits * Width];
        }
      }
    }

    // Of the activations, in units of their scale.
    std::int32_t x_sum(std::size_t t) const {
      std::int32_t all = 0;
      for (std::size_t d = kDigits; d-- > 0;) all = all * 256 + x_sums[t][d];
      return all;
    }
  };

  // The integer of a part as a single. At most 2^28 stands below the last digit: 32 products of a
  // byte and a digit, 256 times.
  static inline __attribute__((always_inline)) F value(const I (&sums)[kDigits]) {
    if constexpr (kDigits == 1) return Ints::to_float(sums[0]);
    if constexpr (kDigits == 3) {
      const F low = Ints::to_float(Ints::add(Ints::times_256(sums[1]), sums[0]));
      return Isa::fma(Isa::set1(65536.0F), Ints::to_float(sums[2]), low);
    }
  }

  // What a part adds to the totals.
  template <std::size_t Width, class Scales>
  static inline __attribute__((always_inline)) void add_part(
      const Scales& scales, bool has_minimum, const I (&dots)[kChains][Width][kDigits],
      const float* x_scales, const Part<Width>& part, F (&total)[Width]) {
#pragma GCC unroll 8
    for (std::size_t t = 0; t < Width; ++t) {
      const F scale = Isa::mul(scales.scale, Isa::set1(x_scales[t]));
      I sums[kDigits];
#pragma GCC unroll 3
      for (std::size_t d = 0; d < kDigits; ++d) {
        sums[d] = dots[0][t][d];
        if constexpr (kChains == 2) sums[d] = Ints::add(sums[d], dots[1][t][d]);
      }
      total[t] = Isa::fma(scale, value(sums), total[t]);
    }
    if (!has_minimum) return;
#pragma GCC unroll 8
    for (std::size_t t = 0; t < Width; ++t) {
      const float sum = -x_scales[t] * static_cast<float>(part.x_sum(t));
      total[t] = Isa::fma(scales.minimum, Isa::set1(sum), total[t]);
    }
  }

  // blocks: side by side; acc: [block][token][16].
  template <WeightKind Kind, std::size_t Blocks, std::size_t Width>
  static void direct(const WeightFormat& format, const std::byte* weights, std::size_t columns,
                     const std::byte* panel, float* acc) {
    using Codes = VnniCodes<Ints, Kind>;
    using Panel = VnniPanel<Isa, Ints, Codes::kOrder, Digits>;
    constexpr bool kHalves = halves<Kind>();
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
      const std::size_t ahead =
          ahead_bytes(static_cast<std::size_t>(codes - weights), block_bytes, Blocks);
      for (std::size_t part = 0; part < parts; ++part) {
        const Part<Width> numbers(sums, kHalves ? 1 : 2);
        sums += (kHalves ? 1 : 2) * kDigits * Width;
#pragma GCC unroll 4
        for (std::size_t b = 0; b < Blocks; ++b) {
          I dots[kChains][Width][kDigits];
#pragma GCC unroll 8
          for (std::size_t t = 0; t < Width; ++t) {
#pragma GCC unroll 3
            for (std::size_t d = 0; d < kDigits; ++d) {
              dots[0][t][d] = Ints::set1(-Codes::kOffset * numbers.x_sums[t][d]);
              if constexpr (kChains == 2) dots[1][t][d] = Ints::set1(0);
            }
          }
#pragma GCC unroll 8
          for (std::size_t step = 0; step < kSteps; ++step) {
            const std::byte* at = codes + b * block_bytes + step * Codes::kStepBytes;
#pragma GCC unroll 4
            for (std::size_t i = 0; i < Codes::kStepBytes; i += 64) {
              Isa::prefetch(at + i + ahead);
            }
            const std::int32_t* of_step = x + step * kStepQuads * kDigits * Width;
            codec.step(
                at, [&](auto quad, I w) __attribute__((always_inline)) {
                  constexpr std::size_t kQuad = decltype(quad)::value;
#pragma GCC unroll 8
                  for (std::size_t t = 0; t < Width; ++t) {
#pragma GCC unroll 3
                    for (std::size_t d = 0; d < kDigits; ++d) {
                      I& sum = dots[(step * kStepQuads + kQuad) % kChains][t][d];
                      sum = Ints::dot(sum, w, of_step + (kQuad * kDigits + d) * Width + t);
                    }
                  }
                });
          }
          auto scales = groups.scales(group, b * block_bytes);
          if constexpr (Codes::kScaleFactor != 1.0F) {
            scales.scale = Isa::mul(scales.scale, Isa::set1(Codes::kScaleFactor));
          }
          add_part<Width>(scales, groups.has_minimum(), dots, x_scales, numbers, total[b]);
        }
        codes += kSteps * Codes::kStepBytes;
        x += kSteps * kStepQuads * kDigits * Width;
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
    using Panel = VnniPanel<Isa, Ints, VnniCodes<Ints, Kind>::kOrder, Digits>;
    return {.panel = {.bytes = Panel::bytes,
                      .pack = PanelBy32<Panel>::pack,
                      .put = PanelBy32<Panel>::put},
            .max_width = static_cast<int>(kMaxWidth),
            .dot = dot<Kind>};
  }

  template <WeightKind Kind>
  static void add(const ProductKernels* (&table)[kWeightKinds]) {
    static constexpr ProductKernels kKernels = kernels<Kind>();
    table[static_cast<std::size_t>(Kind)] = &kKernels;
  }

  // The kinds whose codes are integers.
  static void add_all(const ProductKernels* (&table)[kWeightKinds]) {
    add<WeightKind::kMxfp4>(table);
    add<WeightKind::kNvfp4>(table);
    add<WeightKind::kInt4>(table);
    add<WeightKind::kInt8>(table);
    add<WeightKind::kQ4K>(table);
    add<WeightKind::kQ6K>(table);
  }
};

// Exact and fast products of the kinds whose codes are integers.
template <class Isa, class Ints, template <WeightKind> class Groups>
void add_vnni_products(ProductTable& table) {
  VnniProducts<Isa, Ints, Groups, OneDigit>::add_all(table.fast);
  VnniProducts<Isa, Ints, Groups, ThreeDigits>::add_all(table.exact);
}

}  // namespace
}  // namespace freetoken::exec
