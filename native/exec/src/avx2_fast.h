// Products with int8 activations on AVX2: what numerics = "fast" runs.
//
// Activations are rounded to int8 with one scale per 32 columns. Codes of a chunk of 32 (16)
// columns meet them in integer products, which are exact, so the only error is that rounding; a
// row adds up one number per chunk, in order.
#pragma once
#include <immintrin.h>

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
// codes are too large by, and `chunk`: sums[token] of eight rows.

template <bool E2m1, std::size_t Columns>
struct FastNibbles {
  static constexpr std::size_t kColumns = Columns;
  static constexpr std::size_t kBytes = 8 * Columns;
  static constexpr ColumnOrder kOrder = ColumnOrder::kNibbles;
  // e2m1 as 12 + 2 w: the factor 2 is in kFactor.
  static constexpr int kOffset = E2m1 ? 12 : 8;
  static constexpr float kFactor = E2m1 ? 0.5F : 1.0F;

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
  static constexpr std::size_t kAheadBytes = 2048;
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

  template <WeightFormat Format, std::size_t Width>
  static void tokens(const WeightFormat& format, const std::byte* block, std::size_t columns,
                     const std::byte* panel, float* acc) {
    typename Panel::Row x[Width];
    for (std::size_t t = 0; t < Width; ++t) x[t] = Panel::row(panel, t, columns);
    __m256 total[Width][2];
    for (auto& each : total) each[0] = each[1] = _mm256_setzero_ps();
    const __m256 factor = _mm256_set1_ps(Codec::kFactor);
    std::size_t column = 0;
    for (GroupWalk walk(format, block, columns); !walk.done(); walk.next()) {
      RowScales scales{};
      for (std::size_t half = 0; half < 2; ++half) {
        load_scales(Format, walk.header(), walk.within(), half, scales);
        if constexpr (Codec::kFactor != 1.0F) {
          scales.scale[half] = _mm256_mul_ps(scales.scale[half], factor);
        }
      }
      Code codes = walk.codes();
      for (std::size_t done = 0; done < walk.columns(); done += Codec::kColumns) {
        for (std::size_t line = 0; line < Codec::kBytes; line += 64) {
          _mm_prefetch(codes + kAheadBytes + line, _MM_HINT_T0);
        }
        half_chunk<Format, Width>(codes, column, x, scales.scale[0], scales.offset[0], total, 0);
        half_chunk<Format, Width>(codes, column, x, scales.scale[1], scales.offset[1], total, 1);
        codes += Codec::kBytes;
        column += Codec::kColumns;
      }
    }
    for (std::size_t t = 0; t < Width; ++t, acc += kRowsPerBlock) {
      _mm256_storeu_ps(acc, total[t][0]);
      _mm256_storeu_ps(acc + 8, total[t][1]);
    }
  }

  template <WeightFormat Format>
  static void dot(const WeightFormat& format, const std::byte* weights, int blocks,
                  std::size_t columns, const DotPanel* panels, int panels_count) {
    const std::size_t block_bytes = format.block_bytes(columns);
    for (int block = 0; block < blocks; ++block, weights += block_bytes) {
      for (int i = 0; i < panels_count; ++i) {
        const std::byte* panel = panels[i].data;
        const int width = panels[i].width;
        float* acc = panels[i].acc + static_cast<std::size_t>(block * width) * kRowsPerBlock;
        switch (width) {
          case 1:
            tokens<Format, 1>(format, weights, columns, panel, acc);
            break;
          case 2:
            tokens<Format, 2>(format, weights, columns, panel, acc);
            break;
          case 3:
            tokens<Format, 3>(format, weights, columns, panel, acc);
            break;
          default:
            tokens<Format, 4>(format, weights, columns, panel, acc);
        }
      }
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
