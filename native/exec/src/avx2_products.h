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

// Singles, one token after the other: a row of columns (rounded up to 32), then two numbers for
// every kSumColumns columns, in units of the codec's values: their sum, and what must be added
// because products of the values are too large. Each stands before a zero, a pair of columns like
// others.
template <class Codec>
struct SummedPanel {
  static constexpr std::size_t kSumColumns = Codec::kSumColumns;

  static std::size_t stride(std::size_t columns) { return round_up(columns, 32); }
  static std::size_t row_floats(std::size_t columns) {
    return round_up(stride(columns) + stride(columns) / kSumColumns * 4, 16);
  }
  static std::size_t bytes(std::size_t columns, int width) {
    return row_floats(columns) * static_cast<std::size_t>(width) * sizeof(float);
  }

  static void pack(const Bf16* const* rows, int width, std::size_t columns, std::byte* panel) {
    auto* row = reinterpret_cast<float*>(panel);
    for (int token = 0; token < width; ++token, row += row_floats(columns)) {
      for (std::size_t i = 0; i < columns; ++i) {
        row[i] = Codec::kInput * bf16_to_float(rows[token][i]);
      }
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
          row[lane] = Codec::kInput * bf16_to_float(float_to_bf16(values[lane]));
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

  // Where those numbers of the columns from `first` on stand: pairs, four floats apart.
  static const float* sums(const float* row, std::size_t first, std::size_t columns) {
    return row + stride(columns) + first / kSumColumns * 4;
  }
  static const float* corrections(const float* row, std::size_t first, std::size_t columns) {
    return sums(row, first, columns) + 2;
  }

 private:
  static void finish(float* row, std::size_t begin, std::size_t end, std::size_t columns) {
    for (std::size_t first = begin; first < end; first += kSumColumns) {
      float shifted = 0;
      float unshifted = 0;
      for (std::size_t i = first; i < first + kSumColumns; i += 8) {
        for (std::size_t j = i; j < i + 4; ++j) {
          shifted += row[j];
          unshifted += row[j + 4];
          if constexpr (Codec::kShifted) row[j] -= 0x1p-16F * row[j + 4];
        }
      }
      float* numbers = row + stride(columns) + first / kSumColumns * 4;
      numbers[0] = (shifted + unshifted) / Codec::kUnit;
      numbers[2] = -Codec::kOffset * numbers[0];
      if constexpr (Codec::kShifted) numbers[2] -= Codec::kResidue * 0x1p-16F * unshifted;
      numbers[1] = numbers[3] = 0.0F;
    }
  }
};

// `Many` is the codec for many tokens, with the same values.
template <class Codec, class Many = Codec>
struct Avx2Products {
  static constexpr std::size_t kMaxWidth = 5;  // ten sums of eight rows fit into the registers
  using Panel = SummedPanel<Codec>;
  static constexpr float kTotalUnit = Codec::kUnit / Codec::kInput;
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

  template <WeightFormat Format, class Arranged, int Slot>
  static inline __attribute__((always_inline)) void spread(const RowScales& rows, SlotScales& out) {
    constexpr Offset kUse = offset_of(Format);
    out.scale[Slot] = Arranged::template spread<Slot>(rows.scale[Slot / 2]);
    if constexpr (kUse != Offset::kNone) {
      out.offset[Slot] = Arranged::template spread<Slot>(rows.offset[Slot / 2]);
    }
  }

  template <WeightFormat Format, class Arranged>
  static inline __attribute__((always_inline)) void slot_scales(const GroupWalk& walk,
                                                                SlotScales& out) {
    RowScales rows{};
    load_scales(Format, walk.header(), walk.within(), 0, rows);
    load_scales(Format, walk.header(), walk.within(), 1, rows);
    spread<Format, Arranged, 0>(rows, out);
    spread<Format, Arranged, 1>(rows, out);
    spread<Format, Arranged, 2>(rows, out);
    spread<Format, Arranged, 3>(rows, out);
  }

  // The sums of 16 rows.
  template <class Arranged>
  static void put_rows(float* out, const __m256 (&slots)[4]) {
    const __m256 unit = _mm256_set1_ps(kTotalUnit);
    Arranged::put(out, _mm256_mul_ps(Arranged::rows(slots[0], slots[1]), unit),
                  _mm256_mul_ps(Arranged::rows(slots[2], slots[3]), unit));
  }

  // Numbers of a group of columns, from its first pair on, as a slot wants them.
  template <class Arranged, int Slot>
  static inline __attribute__((always_inline)) __m256 of_group(const float* pairs,
                                                               std::size_t count) {
    __m256 all = Arranged::template factor<Slot>(pairs);
    for (std::size_t i = Codec::kSumColumns; i < count; i += Codec::kSumColumns) {
      pairs += 4;
      all = _mm256_add_ps(all, Arranged::template factor<Slot>(pairs));
    }
    return all;
  }

  // The columns [column, column + count) of one token.
  struct Group {
    const float* row;
    std::size_t column, count, columns;
  };

  // What the group's sum of one slot begins with.
  template <class Arranged, int Slot>
  static inline __attribute__((always_inline)) __m256 initial(const Group& x) {
    if constexpr (!Codec::kShifted) return _mm256_setzero_ps();
    return of_group<Arranged, Slot>(Panel::corrections(x.row, x.column, x.columns), x.count);
  }

  // total <- total + scale * sum (- offset) for one slot.
  template <Offset Use, class Arranged, int Slot>
  static inline __attribute__((always_inline)) __m256 finish(const SlotScales& scales, __m256 sum,
                                                             const Group& x, __m256 total) {
    if constexpr (Use == Offset::kNone) return _mm256_fmadd_ps(scales.scale[Slot], sum, total);
    const __m256 all = of_group<Arranged, Slot>(Panel::sums(x.row, x.column, x.columns), x.count);
    if constexpr (Use == Offset::kBeforeScale) {
      sum = _mm256_fnmadd_ps(scales.offset[Slot], all, sum);
      return _mm256_fmadd_ps(scales.scale[Slot], sum, total);
    }
    total = _mm256_fmadd_ps(scales.scale[Slot], sum, total);
    return _mm256_fnmadd_ps(scales.offset[Slot], all, total);
  }

  // Up to how many tokens codes go straight into the sums. With three the sums leave few registers
  // to decode in, which costs more than it saves where a group is short. (Measured on Zen 3.)
  static constexpr std::size_t few_tokens_of(const WeightFormat& format) {
    const WeightKind kind = format.kind;
    const bool pressed =
        kind == WeightKind::kNvfp4 || kind == WeightKind::kQ6K || kind == WeightKind::kFp8Block;
    return pressed ? 2 : 3;
  }

  // Codes are prefetched this far ahead: the hardware does not look beyond a page. (Measured on
  // Zen 3: 512 is too near.)
  static constexpr std::size_t kAheadBytes = 2048;

  // All steps of a group; the last one of fp8_block may be half there.
  template <class Arranged, std::size_t Unrolled, class Sink, class Advance>
  static inline __attribute__((always_inline)) void steps(Code codes, std::size_t count, Sink& sink,
                                                          Advance advance) {
    std::size_t done = 0;
    for (; done + Unrolled <= count; done += Unrolled) {
#pragma GCC unroll 8
      for (std::size_t step = 0; step < Unrolled; step += Codec::kStepColumns) {
        for (std::size_t line = 0; line < Codec::kStepBytes; line += 64) {
          _mm_prefetch(codes + kAheadBytes + line, _MM_HINT_T0);
        }
        Arranged::step(codes, sink);
        advance();
        codes += Codec::kStepBytes;
      }
    }
    for (; done < count; done += Codec::kStepColumns) {
      alignas(32) std::uint8_t last[Codec::kStepBytes] = {};
      const std::size_t left = count - done;
      std::memcpy(last, codes,
                  left < Codec::kStepColumns ? Codec::kStepBytes / 2 : Codec::kStepBytes);
      Arranged::step(last, sink);
      advance();
      codes += Codec::kStepBytes;
    }
  }

  template <std::size_t Width>
  using Totals = __m256[Width][4];

  // One group of 16 rows for `Width` tokens: total <- total + scale * sum.
  template <WeightFormat Format, std::size_t Width>
  static inline __attribute__((always_inline)) void group(const GroupWalk& walk, const float* rows,
                                                          const Group& columns, std::size_t stride,
                                                          Totals<Width>& total) {
    constexpr std::size_t kUnrolled =
        Format.kind == WeightKind::kNvfp4 || Codec::kStepColumns == 16 ? 16 : 32;
    constexpr Offset kUse = offset_of(Format);
    Group x = columns;
    Direct<Width> sink;
#pragma GCC unroll 4
    for (std::size_t t = 0; t < Width; ++t) {
      x.row = rows + t * stride;
      sink.sum[t][0] = initial<Codec, 0>(x);
      sink.sum[t][1] = initial<Codec, 1>(x);
      sink.sum[t][2] = initial<Codec, 2>(x);
      sink.sum[t][3] = initial<Codec, 3>(x);
    }
    sink.x = rows + x.column;
    sink.stride = stride;
    steps<Codec, kUnrolled>(
        walk.codes(), x.count,
        sink, [&]() __attribute__((always_inline)) { sink.x += Codec::kStepColumns; });
    SlotScales scales;
    slot_scales<Format, Codec>(walk, scales);
#pragma GCC unroll 4
    for (std::size_t t = 0; t < Width; ++t) {
      x.row = rows + t * stride;
      total[t][0] = finish<kUse, Codec, 0>(scales, sink.sum[t][0], x, total[t][0]);
      total[t][1] = finish<kUse, Codec, 1>(scales, sink.sum[t][1], x, total[t][1]);
      total[t][2] = finish<kUse, Codec, 2>(scales, sink.sum[t][2], x, total[t][2]);
      total[t][3] = finish<kUse, Codec, 3>(scales, sink.sum[t][3], x, total[t][3]);
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
  static void few_tokens(const WeightFormat& format, const std::byte* block, std::size_t columns,
                         const float* rows, float* acc) {
    constexpr std::size_t kUsual = Codec::kSumColumns;
    const std::size_t stride = Panel::row_floats(columns);
    Totals<Width> total;
    for (auto& token : total) {
      for (auto& slot : token) slot = _mm256_setzero_ps();
    }
    WeightFormat known = format;
    known.kind = Format.kind;  // for the compiler
    std::size_t column = 0;
    for (GroupWalk walk(known, block, columns); !walk.done(); walk.next()) {
      const std::size_t count = walk.columns();
      if (usual_apart(Format.kind) && count == kUsual) {
        group<Format, Width>(walk, rows, {nullptr, column, kUsual, columns}, stride, total);
      } else {
        group<Format, Width>(walk, rows, {nullptr, column, count, columns}, stride, total);
      }
      column += count;
    }
    for (std::size_t t = 0; t < Width; ++t, acc += kRowsPerBlock) {
      put_rows<Codec>(acc, total[t]);
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
    for (std::size_t t = 0; t < Width; ++t) {
      const Group group{rows + t * stride, column, count, columns};
      sum[t][0] = initial<Many, 2 * Half>(group);
      sum[t][1] = initial<Many, 2 * Half + 1>(group);
    }
    const float* w = codes + 16 * Half;
    const float* x = rows + column;
    for (std::size_t pair = 0; pair < count / 2; ++pair, w += 32, x += 2) {
      const __m256 first = _mm256_load_ps(w);
      const __m256 second = _mm256_load_ps(w + 8);
#pragma GCC unroll 8
      for (std::size_t t = 0; t < Width; ++t) {
        sum[t][0] = _mm256_fmadd_ps(first, Many::template factor<0>(x + t * stride), sum[t][0]);
        sum[t][1] = _mm256_fmadd_ps(second, Many::template factor<1>(x + t * stride), sum[t][1]);
      }
    }
#pragma GCC unroll 8
    for (std::size_t t = 0; t < Width; ++t) {
      float* out = total + 32 * t + 16 * Half;
      const Group group{rows + t * stride, column, count, columns};
      _mm256_store_ps(out,
                      finish<Use, Many, 2 * Half>(scales, sum[t][0], group, _mm256_load_ps(out)));
      _mm256_store_ps(out + 8, finish<Use, Many, 2 * Half + 1>(scales, sum[t][1], group,
                                                               _mm256_load_ps(out + 8)));
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
      slot_scales<Format, Many>(walk, scales);
      Store sink{buffer};
      steps<Many, Many::kStepColumns>(
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
        const __m256 slots[4] = {_mm256_load_ps(total), _mm256_load_ps(total + 8),
                                 _mm256_load_ps(total + 16), _mm256_load_ps(total + 24)};
        put_rows<Many>(acc, slots);
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
      if (panels_count > 1 || width > few_tokens_of(Format)) {
        many_tokens<Format>(format, weights, block, columns, panels, panels_count);
        continue;
      }
      const auto* rows = reinterpret_cast<const float*>(first.data);
      float* acc = first.acc + static_cast<std::size_t>(block) * width * kRowsPerBlock;
      if (width == 1) {
        few_tokens<Format, 1>(format, weights, columns, rows, acc);
      } else if (width == 2) {
        few_tokens<Format, 2>(format, weights, columns, rows, acc);
      } else if constexpr (few_tokens_of(Format) == 3) {
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
