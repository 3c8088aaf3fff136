// Products with bf16 activations of the formats with scales, on AVX2 + FMA.
//
// A few tokens: codes go from the registers they were decoded in straight into the sums. More: they
// are decoded into the first-level cache and used for all of them. Both add the same numbers in the
// same order.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "avx2_codecs.h"
#include "avx2_decoded.h"
#include "avx2_groups.h"
#include "generic_products.h"
#include "kernels.h"
#include "layout.h"

namespace freetoken::exec {
namespace {

// `Arranged` is the codec for many tokens, with the same values.
template <class Codec, class Arranged = Codec>
struct Avx2Products {
  using Groups = Avx2Groups<Codec, Codec>;
  using Many = DecodedTiles<Codec, Arranged>;
  using Panel = SummedPanel<Codec>;

  // Codes times the activations of `Width` tokens.
  template <std::size_t Width>
  struct Direct {
    __m256 sum[Width][4];
    const float* x;

    template <int Pair, int Slot>
    inline __attribute__((always_inline)) void take(__m256 codes) {
#pragma GCC unroll 4
      for (std::size_t t = 0; t < Width; ++t) {
        sum[t][Slot] = _mm256_fmadd_ps(
            codes, Codec::template factor<Slot>(x + (Pair * Width + t) * 2), sum[t][Slot]);
      }
    }
  };

  // Up to how many tokens of a panel codes go straight into the sums. (Measured on Zen 3: with
  // three, whose sums leave few registers to decode in, that costs as much as it saves or more, but
  // for int8, where it saves 4 to 10 %.)
  static constexpr int few_tokens_of(WeightKind kind) { return kind == WeightKind::kInt8 ? 3 : 2; }

  // Up to how many panels of a few tokens are multiplied so, one after the other. (fp8_block gains
  // 2 to 10 % with two panels of two tokens; the others lose or do not differ.)
  static constexpr int few_panels_of(WeightKind kind) {
    return kind == WeightKind::kFp8Block ? 2 : 1;
  }

  template <std::size_t Width>
  using Totals = __m256[Width][4];

  // One group of 16 rows for `Width` tokens: total <- total + scale * sum.
  template <WeightFormat Format, std::size_t Width>
  static inline __attribute__((always_inline)) void group(const GroupWalk& walk, const float* x,
                                                          const float* numbers, std::size_t count,
                                                          Totals<Width>& total) {
    constexpr std::size_t kUnrolled =
        Format.kind == WeightKind::kNvfp4 || Codec::kStepColumns == 16 ? 16 : 32;
    constexpr Offset kUse = offset_of(Format);
    Direct<Width> sink;
#pragma GCC unroll 4
    for (std::size_t t = 0; t < Width; ++t) {
      const float* of_token = numbers + Panel::kNumbers * t;
      sink.sum[t][0] = Groups::template initial<Width, 0>(of_token, count);
      sink.sum[t][1] = Groups::template initial<Width, 1>(of_token, count);
      sink.sum[t][2] = Groups::template initial<Width, 2>(of_token, count);
      sink.sum[t][3] = Groups::template initial<Width, 3>(of_token, count);
    }
    sink.x = x;
    Groups::template steps<kUnrolled, kCodesAheadBytes>(
        walk.codes(), count,
        sink, [&]() __attribute__((always_inline)) { sink.x += Codec::kStepColumns * Width; });
    SlotScales scales;
    Groups::template scales<Format>(walk, scales);
#pragma GCC unroll 4
    for (std::size_t t = 0; t < Width; ++t) {
      const float* of_token = numbers + Panel::kNumbers * t;
      const auto finish = [&]<int Slot>(std::integral_constant<int, Slot>)
          __attribute__((always_inline)) {
        total[t][Slot] = Groups::template finish<kUse, Width, Slot>(
            scales, sink.sum[t][Slot], of_token, count, total[t][Slot]);
      };
      finish(std::integral_constant<int, 0>{});
      finish(std::integral_constant<int, 1>{});
      finish(std::integral_constant<int, 2>{});
      finish(std::integral_constant<int, 3>{});
    }
  }

  // Whether groups of kSumColumns columns, the usual ones, are a case of their own: nothing is then
  // left to decide within one. (Measured on Zen 3: q4_K gains 1 to 6 % by it, nvfp4 2 to 5 %, mxfp4
  // 1 to 5 %, hardly more than the noise; int8 and int4 do not differ; q6_K lost 6 % in the layer,
  // twice, and stays out.)
  static constexpr bool usual_apart(WeightKind kind) {
    return kind != WeightKind::kFp8Block && kind != WeightKind::kQ6K;
  }

  // 16 rows for `Width` tokens. `Format` fixes how scales are read (its group is not looked at), so
  // that the compiler leaves nothing to decide in the loop.
  template <WeightFormat Format, std::size_t Width>
  static __attribute__((noinline)) void few_tokens(const WeightFormat& format,
                                                   const std::byte* block, std::size_t columns,
                                                   const float* panel, float* acc) {
    constexpr std::size_t kUsual = Codec::kSumColumns;
    Totals<Width> total;
    for (auto& token : total) {
      for (auto& slot : token) slot = _mm256_setzero_ps();
    }
    WeightFormat known = format;
    known.kind = Format.kind;  // for the compiler
    std::size_t column = 0;
    for (GroupWalk walk(known, block, columns); !walk.done(); walk.next()) {
      const std::size_t count = walk.columns();
      const float* x = Panel::pairs(panel, column, Width);
      const float* numbers = Panel::numbers(panel, column, columns, Width);
      if (usual_apart(Format.kind) && count == kUsual) {
        group<Format, Width>(walk, x, numbers, kUsual, total);
      } else {
        group<Format, Width>(walk, x, numbers, count, total);
      }
      column += count;
    }
    for (std::size_t t = 0; t < Width; ++t, acc += kRowsPerBlock) {
      Groups::put_rows(acc, total[t]);
    }
  }

  template <WeightFormat Format>
  static void dot(const WeightFormat& format, const std::byte* weights, int blocks,
                  std::size_t columns, const DotPanel* panels, int panels_count) {
    constexpr int kFew = few_tokens_of(Format.kind);
    const std::size_t block_bytes = format.block_bytes(columns);
    // The first panel is one of the widest.
    const bool few = panels_count <= few_panels_of(Format.kind) && panels[0].width <= kFew;
    for (int block = 0; block < blocks; ++block, weights += block_bytes) {
      if (!few) {
        Many::template dot<Format>(format, weights, block, columns, panels, panels_count);
        continue;
      }
      for (int i = 0; i < panels_count; ++i) {
        const auto* panel = reinterpret_cast<const float*>(panels[i].data);
        float* acc =
            panels[i].acc + static_cast<std::size_t>(block * panels[i].width) * kRowsPerBlock;
        if (panels[i].width == 1) {
          few_tokens<Format, 1>(format, weights, columns, panel, acc);
        } else if (panels[i].width == 2) {
          few_tokens<Format, 2>(format, weights, columns, panel, acc);
        } else if constexpr (kFew == 3) {
          few_tokens<Format, 3>(format, weights, columns, panel, acc);
        }
      }
    }
  }

  static constexpr ProductKernels table(decltype(ProductKernels::dot) product) {
    return {.panel = {.bytes = Panel::bytes, .pack = Panel::pack, .put = Panel::put},
            .max_width = static_cast<int>(Many::kMaxWidth),
            .dot = product};
  }
};

// One kernel per way of writing scales.
template <WeightKind Kind, class Products>
void avx2_integer_dot(const WeightFormat& format, const std::byte* weights, int blocks,
                      std::size_t columns, const DotPanel* panels, int panels_count) {
  constexpr WeightFormat kF16{.kind = Kind, .group = 32, .scale = ScaleType::kF16};
  constexpr WeightFormat kBf16{.kind = Kind, .group = 32, .scale = ScaleType::kBf16};
  constexpr WeightFormat kF16Zero{
      .kind = Kind, .group = 32, .scale = ScaleType::kF16, .zero_points = true};
  constexpr WeightFormat kBf16Zero{
      .kind = Kind, .group = 32, .scale = ScaleType::kBf16, .zero_points = true};
  const bool f16 = format.scale == ScaleType::kF16;
  const auto dot =
      format.zero_points
          ? (f16 ? Products::template dot<kF16Zero> : Products::template dot<kBf16Zero>)
          : (f16 ? Products::template dot<kF16> : Products::template dot<kBf16>);
  dot(format, weights, blocks, columns, panels, panels_count);
}

}  // namespace
}  // namespace freetoken::exec
