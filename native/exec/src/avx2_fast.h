// Products with int8 activations on AVX2: what numerics = "fast" runs.
//
// Activations are rounded to int8 with one scale per 32 columns. Codes of a chunk of 32 (16)
// columns meet them in integer products, which are exact, so the only error is that rounding; a
// row adds up one number per chunk, in order.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "avx2_codecs.h"
#include "avx2_scales.h"
#include "int8_panel.h"
#include "kernels.h"
#include "layout.h"

namespace freetoken::exec {
namespace {

inline __m256i four_columns(const std::int8_t* q) {
  std::int32_t four = 0;
  std::memcpy(&four, q, sizeof four);
  return _mm256_set1_epi32(four);
}

inline __m256i add_pairs(__m256i words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }

// Each fast codec: the columns of a chunk, the bytes of its codes (16 rows), what its unsigned
// codes are too large by, how many row blocks are read side by side for one token, and `chunk`:
// sums[token] of eight rows.
//
// A core reads one stream at 0.6 to 0.85 of the rate it reaches with four, however far ahead it
// prefetches. Side by side pays for int8, whose codes are the most bytes for the work on them, and
// for the short chunks of nvfp4; the others gain nothing or lose. (Measured on Zen 3.)

template <bool E2m1, std::size_t Columns>
struct FastNibbles {
  static constexpr std::size_t kColumns = Columns;
  static constexpr std::size_t kBytes = 8 * Columns;
  static constexpr ColumnOrder kOrder = ColumnOrder::kNibbles;
  // e2m1 as 12 + 2 w: the factor 2 is in kFactor.
  static constexpr int kOffset = E2m1 ? 12 : 8;
  static constexpr float kFactor = E2m1 ? 0.5F : 1.0F;
  static constexpr std::size_t kSideBySide = Columns == 16 ? 4 : 1;

  static __m256i values(__m256i nibbles) {
    if constexpr (!E2m1) return nibbles;
    const __m256i table =
        both_lanes(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return _mm256_shuffle_epi8(table, nibbles);
  }

  template <std::size_t Width>
  static inline __attribute__((always_inline)) void chunk(Code at, const std::int8_t* const* q,
                                                          __m256i (&sums)[Width]) {
    const __m256i mask = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (std::size_t half = 0; half < Columns; half += 16) {
      // Four products of 24 * 127 * 2 fit into 16 bits.
      __m256i words[Width];
#pragma GCC unroll 2
      for (std::size_t step = half; step < half + 16; step += 8) {
        const __m256i codes = load_codes(at + 8 * step);
        const __m256i low = values(_mm256_and_si256(codes, mask));
        const __m256i high = values(_mm256_and_si256(_mm256_srli_epi16(codes, 4), mask));
#pragma GCC unroll 4
        for (std::size_t t = 0; t < Width; ++t) {
          const __m256i both =
              _mm256_add_epi16(_mm256_maddubs_epi16(low, four_columns(q[t] + step)),
                               _mm256_maddubs_epi16(high, four_columns(q[t] + step + 4)));
          words[t] = step == half ? both : _mm256_add_epi16(words[t], both);
        }
      }
#pragma GCC unroll 4
      for (std::size_t t = 0; t < Width; ++t) {
        const __m256i pairs = add_pairs(words[t]);
        sums[t] = half == 0 ? pairs : _mm256_add_epi32(sums[t], pairs);
      }
    }
  }
};

struct FastInt8 {
  static constexpr std::size_t kColumns = 32;
  static constexpr std::size_t kBytes = 512;
  static constexpr ColumnOrder kOrder = ColumnOrder::kPlain;
  static constexpr int kOffset = 0;
  static constexpr float kFactor = 1.0F;
  static constexpr std::size_t kSideBySide = 4;

  template <std::size_t Width>
  static inline __attribute__((always_inline)) void chunk(Code at, const std::int8_t* const* q,
                                                          __m256i (&sums)[Width]) {
    for (std::size_t t = 0; t < Width; ++t) sums[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (std::size_t step = 0; step < kColumns; step += 4) {
      const __m256i codes = load_codes(at + 16 * step);
      const __m256i magnitude = _mm256_abs_epi8(codes);
#pragma GCC unroll 4
      for (std::size_t t = 0; t < Width; ++t) {
        // |w| * (x with the sign of w): 128 * 127 * 2 fits into 16 bits, once.
        const __m256i x = _mm256_sign_epi8(four_columns(q[t] + step), codes);
        sums[t] = _mm256_add_epi32(sums[t], add_pairs(_mm256_maddubs_epi16(magnitude, x)));
      }
    }
  }
};

struct FastQ6K {
  static constexpr std::size_t kColumns = 16;
  static constexpr std::size_t kBytes = 192;
  static constexpr ColumnOrder kOrder = ColumnOrder::kNibbles;
  static constexpr int kOffset = 32;
  static constexpr float kFactor = 1.0F;
  static constexpr std::size_t kSideBySide = 1;

  static __m256i join(__m256i nibbles, __m256i plane) {
    return _mm256_or_si256(_mm256_and_si256(nibbles, _mm256_set1_epi8(15)),
                           _mm256_and_si256(plane, _mm256_set1_epi8(0x30)));
  }

  template <std::size_t Width>
  static inline __attribute__((always_inline)) void chunk(Code at, const std::int8_t* const* q,
                                                          __m256i (&sums)[Width]) {
    const __m256i plane = load_codes(at);
    const __m256i first = load_codes(at + 64);
    const __m256i second = load_codes(at + 128);
    const __m256i codes[4] = {join(first, _mm256_slli_epi16(plane, 4)),
                              join(_mm256_srli_epi16(first, 4), _mm256_slli_epi16(plane, 2)),
                              join(second, plane),
                              join(_mm256_srli_epi16(second, 4), _mm256_srli_epi16(plane, 2))};
#pragma GCC unroll 4
    for (std::size_t t = 0; t < Width; ++t) {
      __m256i pairs[4];
#pragma GCC unroll 4
      for (std::size_t i = 0; i < 4; ++i) {
        pairs[i] = _mm256_maddubs_epi16(codes[i], four_columns(q[t] + 4 * i));
      }
      // Two products of 63 * 127 * 2 fit into 16 bits.
      sums[t] = _mm256_add_epi32(add_pairs(_mm256_add_epi16(pairs[0], pairs[1])),
                                 add_pairs(_mm256_add_epi16(pairs[2], pairs[3])));
    }
  }
};

template <class Codec>
struct Avx2Fast {
  static constexpr int kMaxWidth = 4;
  using Panel = Int8Panel<Codec::kOrder>;

  // One half (eight rows) of one chunk for all tokens: total[token] moves on.
  template <WeightFormat Format, std::size_t Width>
  static inline __attribute__((always_inline)) void half_chunk(
      Code codes, std::size_t column, const typename Panel::Row (&x)[Width], __m256 scale,
      __m256 offset, __m256 (&total)[Width][2], std::size_t half) {
    const std::int8_t* q[Width];
    for (std::size_t t = 0; t < Width; ++t) q[t] = x[t].codes + column;
    __m256i sums[Width];
    Codec::template chunk<Width>(codes + 32 * half, q, sums);
#pragma GCC unroll 4
    for (std::size_t t = 0; t < Width; ++t) {
      const std::int32_t x_sum = Codec::kColumns == 16
                                     ? x[t].sums[column / 16]
                                     : x[t].sums[column / 16] + x[t].sums[column / 16 + 1];
      constexpr bool kQ4K = Format.kind == WeightKind::kQ4K;
      constexpr int kOffset = kQ4K ? 0 : Codec::kOffset;
      if constexpr (kOffset != 0) {
        sums[t] = _mm256_sub_epi32(sums[t], _mm256_set1_epi32(kOffset * x_sum));
      }
      __m256 sum = _mm256_cvtepi32_ps(sums[t]);
      const __m256 x_scale = _mm256_set1_ps(x[t].scales[column / 32]);
      const __m256 all = _mm256_set1_ps(static_cast<float>(x_sum));
      if constexpr (Format.zero_points) sum = _mm256_fnmadd_ps(offset, all, sum);
      total[t][half] = _mm256_fmadd_ps(sum, _mm256_mul_ps(scale, x_scale), total[t][half]);
      if constexpr (kQ4K) {
        total[t][half] = _mm256_fnmadd_ps(offset, _mm256_mul_ps(all, x_scale), total[t][half]);
      }
    }
  }

  // The columns of one group of `Blocks` row blocks, chunk by chunk in turn.
  template <WeightFormat Format, std::size_t Width, std::size_t Blocks>
  static inline __attribute__((always_inline)) void group(const GroupWalk& walk,
                                                          std::size_t block_bytes,
                                                          std::size_t ahead, std::size_t column,
                                                          const typename Panel::Row (&x)[Width],
                                                          __m256 (&total)[Blocks][Width][2]) {
    const __m256 factor = _mm256_set1_ps(Codec::kFactor);
    Code codes = walk.codes();
    for (std::size_t done = 0; done < walk.columns(); done += Codec::kColumns) {
#pragma GCC unroll 4
      for (std::size_t b = 0; b < Blocks; ++b) {
        const Code at = codes + b * block_bytes;
        for (std::size_t line = 0; line < Codec::kBytes; line += 64) {
          _mm_prefetch(at + ahead + line, _MM_HINT_T0);
        }
        RowScales scales{};
#pragma GCC unroll 2
        for (std::size_t half = 0; half < 2; ++half) {
          load_scales(Format, walk.header() + b * block_bytes, walk.within(), half, scales);
          if constexpr (Codec::kFactor != 1.0F) {
            scales.scale[half] = _mm256_mul_ps(scales.scale[half], factor);
          }
          half_chunk<Format, Width>(at, column + done, x, scales.scale[half], scales.offset[half],
                                    total[b], half);
        }
      }
      codes += Codec::kBytes;
    }
  }

  // `Blocks` times 16 rows.
  template <WeightFormat Format, std::size_t Width, std::size_t Blocks>
  static void tokens(const WeightFormat& format, const std::byte* weights, std::size_t columns,
                     const std::byte* panel, float* acc) {
    const std::size_t block_bytes = format.block_bytes(columns);
    typename Panel::Row x[Width];
    for (std::size_t t = 0; t < Width; ++t) x[t] = Panel::row(panel, t, columns);
    __m256 total[Blocks][Width][2];
    for (auto& of_block : total) {
      for (auto& each : of_block) each[0] = each[1] = _mm256_setzero_ps();
    }
    constexpr std::size_t kAheadBytes = Blocks == 1 ? 2048 : 512;
    const auto* begin = reinterpret_cast<Code>(weights);
    std::size_t column = 0;
    for (GroupWalk walk(format, weights, columns); !walk.done(); walk.next()) {
      // From the end of a block each stream goes on after those beside it.
      const auto ahead = static_cast<std::size_t>(walk.codes() - begin) + kAheadBytes;
      const std::size_t skipped = ahead < block_bytes ? 0 : (Blocks - 1) * block_bytes;
      group<Format, Width, Blocks>(walk, block_bytes, kAheadBytes + skipped, column, x, total);
      column += walk.columns();
    }
    for (const auto& of_block : total) {
      for (std::size_t t = 0; t < Width; ++t, acc += kRowsPerBlock) {
        _mm256_storeu_ps(acc, of_block[t][0]);
        _mm256_storeu_ps(acc + 8, of_block[t][1]);
      }
    }
  }

  // Row blocks side by side as far as there are enough, then one by one.
  template <WeightFormat Format, std::size_t Width>
  static void some_blocks(const WeightFormat& format, const std::byte* weights, std::size_t blocks,
                          std::size_t columns, const std::byte* panel, float* acc) {
    constexpr std::size_t kTogether =
        std::max<std::size_t>(1, Width > 2 ? 1 : Codec::kSideBySide / Width);
    const std::size_t block_bytes = format.block_bytes(columns);
    while (blocks > 0) {
      const std::size_t count = blocks < kTogether ? 1 : kTogether;
      if (count == 1) {
        tokens<Format, Width, 1>(format, weights, columns, panel, acc);
      } else {
        tokens<Format, Width, kTogether>(format, weights, columns, panel, acc);
      }
      weights += count * block_bytes;
      acc += count * Width * kRowsPerBlock;
      blocks -= count;
    }
  }

  template <WeightFormat Format>
  static void dot(const WeightFormat& format, const std::byte* weights, int blocks,
                  std::size_t columns, const DotPanel* panels, int panels_count) {
    const std::size_t block_bytes = format.block_bytes(columns);
    // Several panels use one block while it is in the first-level cache.
    const int step = panels_count == 1 ? blocks : 1;
    for (int block = 0; block < blocks; block += step) {
      const auto count = static_cast<std::size_t>(step);
      for (int i = 0; i < panels_count; ++i) {
        const std::byte* panel = panels[i].data;
        const int width = panels[i].width;
        float* acc = panels[i].acc + static_cast<std::size_t>(block * width) * kRowsPerBlock;
        switch (width) {
          case 1:
            some_blocks<Format, 1>(format, weights, count, columns, panel, acc);
            break;
          case 2:
            some_blocks<Format, 2>(format, weights, count, columns, panel, acc);
            break;
          case 3:
            some_blocks<Format, 3>(format, weights, count, columns, panel, acc);
            break;
          default:
            some_blocks<Format, 4>(format, weights, count, columns, panel, acc);
        }
      }
      weights += count * block_bytes;
    }
  }

  static constexpr ProductKernels table(decltype(ProductKernels::dot) product) {
    return {.panel = {.bytes = Panel::bytes, .pack = Panel::pack, .put = Panel::put},
            .max_width = kMaxWidth,
            .dot = product};
  }
};

}  // namespace
}  // namespace freetoken::exec
