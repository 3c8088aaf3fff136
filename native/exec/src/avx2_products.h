// Products with bf16 activations of the formats with scales, on AVX2 + FMA.
//
// A few tokens: codes go from the registers they were decoded in straight into the sums. More: one
// group of 16 rows is decoded into the first-level cache and used for all of them. Both add the
// same numbers in the same order.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "avx2_codecs.h"
#include "avx2_scales.h"
#include "bf16.h"
#include "generic_products.h"
#include "kernels.h"
#include "layout.h"
#include "tiles.h"

namespace freetoken::exec {
namespace {

// Singles, one token after the other: a row of columns (rounded up to 32), then for every 16
// columns their sum and what the products of a NibbleCodec are too large by (in its units).
template <class Codec>
struct SummedPanel {
  static std::size_t stride(std::size_t columns) { return round_up(columns, 32); }
  static std::size_t row_floats(std::size_t columns) {
    return round_up(stride(columns) + stride(columns) / 8, 16);
  }
  static std::size_t bytes(std::size_t columns, int width) {
    return row_floats(columns) * static_cast<std::size_t>(width) * sizeof(float);
  }

  static void pack(const Bf16* const* rows, int width, std::size_t columns, std::byte* panel) {
    auto* row = reinterpret_cast<float*>(panel);
    for (int token = 0; token < width; ++token, row += row_floats(columns)) {
      for (std::size_t i = 0; i < columns; ++i) row[i] = bf16_to_float(rows[token][i]);
      for (std::size_t i = columns; i < stride(columns); ++i) row[i] = 0.0F;
      finish(row, 0, stride(columns), columns);
    }
  }

  static void put(const float* values, int blocks, int width, std::size_t first_column,
                  std::size_t columns, std::byte* panel) {
    auto* rows = reinterpret_cast<float*>(panel);
    const std::size_t end = first_column + static_cast<std::size_t>(blocks) * kRowsPerBlock;
    for (int block = 0; block < blocks; ++block) {
      const std::size_t column = first_column + static_cast<std::size_t>(block) * kRowsPerBlock;
      for (int token = 0; token < width; ++token, values += kRowsPerBlock) {
        float* row = rows + static_cast<std::size_t>(token) * row_floats(columns) + column;
        for (std::size_t lane = 0; lane < kRowsPerBlock; ++lane) {
          row[lane] = bf16_to_float(float_to_bf16(values[lane]));
        }
      }
    }
    const std::size_t padded_end = end == columns ? stride(columns) : end;
    for (int token = 0; token < width; ++token) {
      float* row = rows + static_cast<std::size_t>(token) * row_floats(columns);
      for (std::size_t i = end; i < padded_end; ++i) row[i] = 0.0F;
      finish(row, first_column, padded_end, columns);
    }
  }

  struct Sums {
    float all, excess;
  };
  // Of columns [first, first + count): whole groups of 16, in order.
  static Sums sums_of(const float* row, std::size_t first, std::size_t count, std::size_t columns) {
    const float* sums = row + stride(columns) + first / 8;
    Sums total{sums[0], sums[1]};
    for (std::size_t i = 1; i < ceil_div(count, 16); ++i) {
      total.all += sums[2 * i];
      total.excess += sums[2 * i + 1];
    }
    return total;
  }

 private:
  static void finish(float* row, std::size_t begin, std::size_t end, std::size_t columns) {
    float* sums = row + stride(columns);
    for (std::size_t first = begin; first < end; first += 16) {
      float shifted = 0;
      float unshifted = 0;
      for (std::size_t i = first; i < first + 16; i += 8) {
        for (std::size_t j = i; j < i + 4; ++j) {
          shifted += row[j];
          unshifted += row[j + 4];
          if constexpr (Codec::kShifted) row[j] -= 0x1p-16F * row[j + 4];
        }
      }
      sums[first / 8] = shifted + unshifted;
      sums[first / 8 + 1] = static_cast<float>(Codec::kOffset) * (shifted + unshifted) +
                            16.0F * 126.0F * 0x1p-16F * unshifted;
    }
  }
};

template <class Codec>
struct Avx2Products {
  static constexpr std::size_t kMaxWidth = 5;  // ten sums of eight rows fit into the registers
  static constexpr std::size_t kFewTokens = 3;
  using Panel = SummedPanel<Codec>;
  using Sums = typename Panel::Sums;
  static constexpr std::size_t kPairs = Codec::kStepColumns / 2;
  static constexpr std::size_t kLargestGroup = 128;
  static constexpr std::size_t kMostTokens = kTileTokens + kMaxWidth;  // of one call

  // Codes times the activations of `Width` tokens.
  template <std::size_t Width>
  struct Direct {
    __m256 sum[Width][4];
    const float* x;
    std::size_t stride;  // from one token to the next

    template <int Pair, int Slot>
    inline __attribute__((always_inline)) void take(__m256 codes) {
#pragma GCC unroll 4
      for (std::size_t t = 0; t < Width; ++t) {
        sum[t][Slot] = _mm256_fmadd_ps(
            codes, Codec::template factor<Slot>(x + t * stride + 2 * Pair), sum[t][Slot]);
      }
    }
  };

  // Codes into a buffer [pair of columns][slot][8].
  struct Store {
    float* out;

    template <int Pair, int Slot>
    inline __attribute__((always_inline)) void take(__m256 codes) {
      _mm256_store_ps(out + (Pair * 4 + Slot) * 8, codes);
    }
  };

  // Scales and offsets of one group of 16 rows as the slots want them.
  struct SlotScales {
    __m256 scale[4];
    __m256 offset[4];
  };

  // What `RowScales::offset` is for.
  enum class Offset { kNone, kBeforeScale, kAfterScale };

  static constexpr Offset offset_of(const WeightFormat& format) {
    return format.kind == WeightKind::kQ4K ? Offset::kAfterScale
           : format.zero_points            ? Offset::kBeforeScale
                                           : Offset::kNone;
  }

  template <WeightFormat Format, int Slot>
  static inline __attribute__((always_inline)) void spread(const RowScales& rows, SlotScales& out) {
    constexpr Offset kUse = offset_of(Format);
    out.scale[Slot] = Codec::template spread<Slot>(rows.scale[Slot / 2]);
    if constexpr (kUse != Offset::kNone) {
      out.offset[Slot] = Codec::template spread<Slot>(rows.offset[Slot / 2]);
    }
    if constexpr (Codec::kUnit != 1.0F) {
      out.scale[Slot] = _mm256_mul_ps(out.scale[Slot], _mm256_set1_ps(1.0F / Codec::kUnit));
    }
    if constexpr (Codec::kUnit != 1.0F && kUse == Offset::kBeforeScale) {
      out.offset[Slot] = _mm256_mul_ps(out.offset[Slot], _mm256_set1_ps(Codec::kUnit));
    }
  }

  template <WeightFormat Format>
  static inline __attribute__((always_inline)) void slot_scales(const GroupWalk& walk,
                                                                SlotScales& out) {
    RowScales rows{};
    load_scales(Format, walk.header(), walk.within(), 0, rows);
    load_scales(Format, walk.header(), walk.within(), 1, rows);
    spread<Format, 0>(rows, out);
    spread<Format, 1>(rows, out);
    spread<Format, 2>(rows, out);
    spread<Format, 3>(rows, out);
  }

  // total <- total + scale * sum (- offset) for one slot.
  template <Offset Use, int Slot>
  static inline __attribute__((always_inline)) __m256 finish(const SlotScales& scales, __m256 sum,
                                                             const Sums& x, __m256 total) {
    if constexpr (Codec::kShifted) {
      sum = _mm256_fmsub_ps(sum, _mm256_set1_ps(16.0F),
                            Codec::template once<Slot>(_mm256_set1_ps(x.excess)));
    }
    const __m256 all = Codec::template once<Slot>(_mm256_set1_ps(x.all));
    if constexpr (Use == Offset::kBeforeScale) {
      sum = _mm256_fnmadd_ps(scales.offset[Slot], all, sum);
    }
    total = _mm256_fmadd_ps(scales.scale[Slot], sum, total);
    if constexpr (Use == Offset::kAfterScale) {
      total = _mm256_fnmadd_ps(scales.offset[Slot], all, total);
    }
    return total;
  }

  template <Offset Use>
  static inline __attribute__((always_inline)) Sums sums(const float* row, std::size_t column,
                                                         std::size_t count, std::size_t columns) {
    if constexpr (!Codec::kShifted && Use == Offset::kNone) return {};
    return Panel::sums_of(row, column, count, columns);
  }

  // Codes are prefetched this far ahead: the hardware does not look beyond a page. (Measured on
  // Zen 3: 512 is too near.)
  static constexpr std::size_t kAheadBytes = 2048;

  // All steps of a group; the last one of fp8_block may be half there.
  template <std::size_t Unrolled, class Sink, class Advance>
  static inline __attribute__((always_inline)) void steps(Code codes, std::size_t count, Sink& sink,
                                                          Advance advance) {
    std::size_t done = 0;
    for (; done + Unrolled <= count; done += Unrolled) {
#pragma GCC unroll 8
      for (std::size_t step = 0; step < Unrolled; step += Codec::kStepColumns) {
        for (std::size_t line = 0; line < Codec::kStepBytes; line += 64) {
          _mm_prefetch(codes + kAheadBytes + line, _MM_HINT_T0);
        }
        Codec::step(codes, sink);
        advance();
        codes += Codec::kStepBytes;
      }
    }
    for (; done < count; done += Codec::kStepColumns) {
      alignas(32) std::uint8_t last[Codec::kStepBytes] = {};
      const std::size_t left = count - done;
      std::memcpy(last, codes,
                  left < Codec::kStepColumns ? Codec::kStepBytes / 2 : Codec::kStepBytes);
      Codec::step(last, sink);
      advance();
      codes += Codec::kStepBytes;
    }
  }

  // 16 rows for `Width` tokens. `Format` fixes how scales are read (its group is not looked at), so
  // that the compiler leaves nothing to decide in the loop.
  template <WeightFormat Format, std::size_t Width>
  static void few_tokens(const WeightFormat& format, const std::byte* block, std::size_t columns,
                         const float* rows, float* acc) {
    constexpr std::size_t kUnrolled =
        Format.kind == WeightKind::kNvfp4 || Codec::kStepColumns == 16 ? 16 : 32;
    constexpr Offset kUse = offset_of(Format);
    const std::size_t stride = Panel::row_floats(columns);
    __m256 total[Width][4];
    for (auto& token : total) {
      for (auto& slot : token) slot = _mm256_setzero_ps();
    }
    std::size_t column = 0;
    for (GroupWalk walk(format, block, columns); !walk.done(); walk.next()) {
      const std::size_t count = walk.columns();
      Direct<Width> sink;
      for (auto& token : sink.sum) {
        for (auto& slot : token) slot = _mm256_setzero_ps();
      }
      sink.x = rows + column;
      sink.stride = stride;
      steps<kUnrolled>(
          walk.codes(), count,
          sink, [&]() __attribute__((always_inline)) { sink.x += Codec::kStepColumns; });
      SlotScales scales;
      slot_scales<Format>(walk, scales);
#pragma GCC unroll 4
      for (std::size_t t = 0; t < Width; ++t) {
        const Sums x_sums = sums<kUse>(rows + t * stride, column, count, columns);
        total[t][0] = finish<kUse, 0>(scales, sink.sum[t][0], x_sums, total[t][0]);
        total[t][1] = finish<kUse, 1>(scales, sink.sum[t][1], x_sums, total[t][1]);
        total[t][2] = finish<kUse, 2>(scales, sink.sum[t][2], x_sums, total[t][2]);
        total[t][3] = finish<kUse, 3>(scales, sink.sum[t][3], x_sums, total[t][3]);
      }
      column += count;
    }
    for (std::size_t t = 0; t < Width; ++t, acc += kRowsPerBlock) {
      _mm256_storeu_ps(acc, Codec::rows(total[t][0], total[t][1]));
      _mm256_storeu_ps(acc + 8, Codec::rows(total[t][2], total[t][3]));
    }
  }

  // One decoded group for `Width` tokens. total: [token][slot][8].
  template <Offset Use, std::size_t Width, int Half>
  static inline __attribute__((always_inline)) void half_group(
      const SlotScales& scales, const float* codes, const float* rows, std::size_t column,
      std::size_t count, std::size_t columns, float* total) {
    const std::size_t stride = Panel::row_floats(columns);
    __m256 sum[Width][2];
#pragma GCC unroll 8
    for (std::size_t t = 0; t < Width; ++t) sum[t][0] = sum[t][1] = _mm256_setzero_ps();
    const float* w = codes + 16 * Half;
    const float* x = rows + column;
    for (std::size_t pair = 0; pair < count / 2; ++pair, w += 32, x += 2) {
      const __m256 first = _mm256_load_ps(w);
      const __m256 second = _mm256_load_ps(w + 8);
#pragma GCC unroll 8
      for (std::size_t t = 0; t < Width; ++t) {
        sum[t][0] = _mm256_fmadd_ps(first, Codec::template factor<0>(x + t * stride), sum[t][0]);
        sum[t][1] = _mm256_fmadd_ps(second, Codec::template factor<1>(x + t * stride), sum[t][1]);
      }
    }
#pragma GCC unroll 8
    for (std::size_t t = 0; t < Width; ++t) {
      float* out = total + 32 * t + 16 * Half;
      const Sums x_sums = sums<Use>(rows + t * stride, column, count, columns);
      _mm256_store_ps(out, finish<Use, 2 * Half>(scales, sum[t][0], x_sums, _mm256_load_ps(out)));
      _mm256_store_ps(
          out + 8, finish<Use, 2 * Half + 1>(scales, sum[t][1], x_sums, _mm256_load_ps(out + 8)));
    }
  }

  template <Offset Use, std::size_t Width>
  static void tokens(const SlotScales& scales, const float* codes, const float* rows,
                     std::size_t column, std::size_t count, std::size_t columns, float* total) {
    half_group<Use, Width, 0>(scales, codes, rows, column, count, columns, total);
    half_group<Use, Width, 1>(scales, codes, rows, column, count, columns, total);
  }

  template <Offset Use>
  static void any_tokens(int width, const SlotScales& scales, const float* codes, const float* rows,
                         std::size_t column, std::size_t count, std::size_t columns, float* total) {
    switch (width) {
      case 1:
        return tokens<Use, 1>(scales, codes, rows, column, count, columns, total);
      case 2:
        return tokens<Use, 2>(scales, codes, rows, column, count, columns, total);
      case 3:
        return tokens<Use, 3>(scales, codes, rows, column, count, columns, total);
      case 4:
        return tokens<Use, 4>(scales, codes, rows, column, count, columns, total);
      default:
        return tokens<Use, 5>(scales, codes, rows, column, count, columns, total);
    }
  }

  template <WeightFormat Format>
  static void many_tokens(const WeightFormat& format, const std::byte* weights, int block,
                          std::size_t columns, const DotPanel* panels, int panels_count) {
    // A group of fp8_block may end in half a step, of which the rest is zeros.
    alignas(64) float buffer[kLargestGroup * kRowsPerBlock];
    alignas(64) float totals[kMostTokens * 2 * kRowsPerBlock];
    std::size_t all_tokens = 0;
    for (int i = 0; i < panels_count; ++i) all_tokens += static_cast<std::size_t>(panels[i].width);
    std::memset(totals, 0, all_tokens * 2 * kRowsPerBlock * sizeof(float));
    std::size_t column = 0;
    for (GroupWalk walk(format, weights, columns); !walk.done(); walk.next()) {
      const std::size_t count = walk.columns();
      SlotScales scales;
      slot_scales<Format>(walk, scales);
      Store sink{buffer};
      steps<Codec::kStepColumns>(
          walk.codes(), count,
          sink, [&]() __attribute__((always_inline)) { sink.out += kPairs * 32; });
      float* total = totals;
      for (int i = 0; i < panels_count; ++i) {
        any_tokens<offset_of(Format)>(panels[i].width, scales, buffer,
                                      reinterpret_cast<const float*>(panels[i].data), column, count,
                                      columns, total);
        total += panels[i].width * 32;
      }
      column += count;
    }
    const float* total = totals;
    for (int i = 0; i < panels_count; ++i) {
      float* acc =
          panels[i].acc + static_cast<std::size_t>(block * panels[i].width) * kRowsPerBlock;
      for (int token = 0; token < panels[i].width; ++token, total += 32, acc += kRowsPerBlock) {
        for (std::size_t half = 0; half < 2; ++half) {
          _mm256_storeu_ps(acc + 8 * half, Codec::rows(_mm256_load_ps(total + 16 * half),
                                                       _mm256_load_ps(total + 16 * half + 8)));
        }
      }
    }
  }

  template <WeightFormat Format>
  static void dot(const WeightFormat& format, const std::byte* weights, int blocks,
                  std::size_t columns, const DotPanel* panels, int panels_count) {
    const std::size_t block_bytes = format.block_bytes(columns);
    for (int block = 0; block < blocks; ++block, weights += block_bytes) {
      const DotPanel& first = panels[0];
      const auto width = static_cast<std::size_t>(first.width);
      if (panels_count > 1 || width > kFewTokens) {
        many_tokens<Format>(format, weights, block, columns, panels, panels_count);
        continue;
      }
      const auto* rows = reinterpret_cast<const float*>(first.data);
      float* acc = first.acc + static_cast<std::size_t>(block) * width * kRowsPerBlock;
      if (width == 1) {
        few_tokens<Format, 1>(format, weights, columns, rows, acc);
      } else if (width == 2) {
        few_tokens<Format, 2>(format, weights, columns, rows, acc);
      } else {
        few_tokens<Format, 3>(format, weights, columns, rows, acc);
      }
    }
  }

  static constexpr ProductKernels table(decltype(ProductKernels::dot) product) {
    return {.panel = {.bytes = Panel::bytes, .pack = Panel::pack, .put = Panel::put},
            .max_width = static_cast<int>(kMaxWidth),
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
