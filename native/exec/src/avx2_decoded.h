// Products of many tokens: some columns of 16 rows are decoded into the first-level cache and used
// for the tokens of all panels, of which each reads one stretch of its activations after the other.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstring>

#include "avx2_groups.h"
#include "kernels.h"
#include "layout.h"
#include "tiles.h"

namespace freetoken::exec {
namespace {

template <class Codec, class Arranged>
struct DecodedTiles {
  using Groups = Avx2Groups<Codec, Arranged>;
  using Panel = typename Groups::Panel;
  static constexpr std::size_t kMaxWidth = 3;  // twelve sums of eight rows fit into the registers
  static constexpr std::size_t kMostTokens = kTileTokens + kMaxWidth;  // of one call
  // Columns decoded at a time: 16 KiB of codes beside the activations of a panel and the totals.
  static constexpr std::size_t kChunkColumns = 256;
  // While a chunk is multiplied, the next one with its scales is on its way.
  static constexpr std::size_t kAheadBytes =
      kChunkColumns / Arranged::kStepColumns * Arranged::kStepBytes + 256;
  static constexpr std::size_t kSmallestGroup = Codec::kSumColumns;
  static constexpr std::size_t kPairsAtOnce = 4;  // of columns, in one turn of the loop
  static constexpr std::size_t kLoadedSlots = 3;  // into a register, of four
  static constexpr std::size_t kPairValues = 2 * kRowsPerBlock;  // of two columns

  struct Chunk {
    alignas(64) float codes[kChunkColumns * kRowsPerBlock];  // [pair of columns][slot][8]
    SlotScales scales[kChunkColumns / kSmallestGroup];
    std::size_t first_column, columns;
    std::size_t group_columns;  // all but the last have as many
  };

  struct Store {
    float* out;

    template <int Pair, int Slot>
    inline __attribute__((always_inline)) void take(__m256 codes) {
      _mm256_store_ps(out + (Pair * 4 + Slot) * 8, codes);
    }
  };

  // The next groups of a block.
  template <WeightFormat Format>
  static void decode(GroupWalk& walk, Chunk& chunk) {
    chunk.first_column += chunk.columns;
    chunk.group_columns = walk.columns();
    chunk.columns = 0;
    SlotScales* scales = chunk.scales;
    Store sink{chunk.codes};
    while (!walk.done() && chunk.columns + walk.columns() <= kChunkColumns) {
      Groups::template scales<Format>(walk, *scales++);
      Groups::template steps<Arranged::kStepColumns, kAheadBytes>(
          walk.codes(), walk.columns(), sink, [&]() __attribute__((always_inline)) {
            sink.out += Arranged::kStepColumns / 2 * kPairValues;
          });
      chunk.columns += walk.columns();
      walk.next();
    }
  }

  template <std::size_t Width>
  using Sums = __m256[Width][4];

  // One pair of columns. Twelve sums, three factors and the codes of a slot fill the registers. The
  // last slot's codes are read where they are multiplied, which saves an instruction. (Measured on
  // Zen 3: with those of two slots read so it was 5 to 9 % slower, having more loads than there is
  // time for. The compiler would not read them so by itself.)
  template <std::size_t Width>
  static inline __attribute__((always_inline)) void pair_of_columns(const float* w, const float* x,
                                                                    Sums<Width>& sum) {
    __m256 factor[Width];
#pragma GCC unroll 4
    for (std::size_t t = 0; t < Width; ++t) factor[t] = Arranged::template factor<0>(x + 2 * t);
#pragma GCC unroll 4
    for (std::size_t slot = 0; slot < 4; ++slot) {
      if (slot < kLoadedSlots) {
        const __m256 codes = _mm256_load_ps(w + 8 * slot);
#pragma GCC unroll 4
        for (std::size_t t = 0; t < Width; ++t) {
          asm("vfmadd231ps %2, %1, %0" : "+x"(sum[t][slot]) : "x"(factor[t]), "x"(codes));
        }
      } else {
        const auto* codes = reinterpret_cast<const __m256*>(w + 8 * slot);
#pragma GCC unroll 4
        for (std::size_t t = 0; t < Width; ++t) {
          asm("vfmadd231ps %2, %1, %0" : "+x"(sum[t][slot]) : "x"(factor[t]), "m"(*codes));
        }
      }
    }
  }

  // Adds the group's sums of one slot to the totals.
  template <Offset Use, std::size_t Width, int Slot>
  static inline __attribute__((always_inline)) void finish(const SlotScales& scales,
                                                           const float* numbers, std::size_t count,
                                                           const Sums<Width>& sums, float* totals) {
#pragma GCC unroll 4
    for (std::size_t t = 0; t < Width; ++t) {
      float* total = totals + t * kPairValues + 8 * Slot;
      const float* of_token = numbers + Panel::kNumbers * t;
      _mm256_store_ps(total, Groups::template finish<Use, Width, Slot>(
                                 scales, sums[t][Slot], of_token, count, _mm256_load_ps(total)));
    }
  }

  // One group of columns. totals: [token][slot][8].
  template <Offset Use, std::size_t Width>
  static inline __attribute__((always_inline)) void group(const SlotScales& scales, const float* w,
                                                          const float* x, const float* numbers,
                                                          std::size_t count, float* totals) {
    Sums<Width> sum;
#pragma GCC unroll 4
    for (std::size_t t = 0; t < Width; ++t) {
      const __m256 initial =
          Groups::template initial<Width, 0>(numbers + Panel::kNumbers * t, count);
#pragma GCC unroll 4
      for (auto& slot : sum[t]) slot = initial;
    }
    std::size_t pair = 0;
    for (; pair + kPairsAtOnce <= count / 2; pair += kPairsAtOnce) {
#pragma GCC unroll 8
      for (std::size_t i = 0; i < kPairsAtOnce; ++i) {
        pair_of_columns<Width>(w + i * kPairValues, x + i * 2 * Width, sum);
      }
      w += kPairsAtOnce * kPairValues;
      x += kPairsAtOnce * 2 * Width;
    }
    for (; pair < count / 2; ++pair) {
      pair_of_columns<Width>(w, x, sum);
      w += kPairValues;
      x += 2 * Width;
    }
    finish<Use, Width, 0>(scales, numbers, count, sum, totals);
    finish<Use, Width, 1>(scales, numbers, count, sum, totals);
    finish<Use, Width, 2>(scales, numbers, count, sum, totals);
    finish<Use, Width, 3>(scales, numbers, count, sum, totals);
  }

  // A chunk for the `Width` tokens of a panel.
  template <Offset Use, std::size_t Width>
  static __attribute__((noinline)) void tokens(const Chunk& chunk, const float* panel,
                                               std::size_t columns, float* totals) {
    constexpr std::size_t kUsual = Codec::kSumColumns;
    const float* w = chunk.codes;
    const float* x = Panel::pairs(panel, chunk.first_column, Width);
    const float* numbers = Panel::numbers(panel, chunk.first_column, columns, Width);
    const SlotScales* scales = chunk.scales;
    if (chunk.group_columns == kUsual && chunk.columns % kUsual == 0) {
      for (std::size_t done = 0; done < chunk.columns; done += kUsual) {
        asm("" : "+r"(totals));  // they stay in memory: the registers are for the sums
        group<Use, Width>(*scales++, w, x, numbers, kUsual, totals);
        w += kUsual / 2 * kPairValues;
        x += kUsual * Width;
        numbers += Panel::kNumbers * Width;
      }
      return;
    }
    for (std::size_t done = 0; done < chunk.columns;) {
      const std::size_t left = chunk.columns - done;
      const std::size_t count = left < chunk.group_columns ? left : chunk.group_columns;
      asm("" : "+r"(totals));
      group<Use, Width>(*scales++, w, x, numbers, count, totals);
      w += count / 2 * kPairValues;
      x += count * Width;
      numbers += count / kUsual * Panel::kNumbers * Width;
      done += count;
    }
  }

  template <Offset Use>
  static void any_tokens(int width, const Chunk& chunk, const float* panel, std::size_t columns,
                         float* totals) {
    switch (width) {
      case 1:
        return tokens<Use, 1>(chunk, panel, columns, totals);
      case 2:
        return tokens<Use, 2>(chunk, panel, columns, totals);
      default:
        return tokens<Use, 3>(chunk, panel, columns, totals);
    }
  }

  // Row block number `block` of a call, at `weights`, for all panels.
  template <WeightFormat Format>
  static void dot(const WeightFormat& format, const std::byte* weights, int block,
                  std::size_t columns, const DotPanel* panels, int panels_count) {
    Chunk chunk;
    chunk.first_column = chunk.columns = 0;
    alignas(64) float totals[kMostTokens * 2 * kRowsPerBlock];
    std::size_t all_tokens = 0;
    for (int i = 0; i < panels_count; ++i) all_tokens += static_cast<std::size_t>(panels[i].width);
    std::memset(totals, 0, all_tokens * 2 * kRowsPerBlock * sizeof(float));
    for (GroupWalk walk(format, weights, columns); !walk.done();) {
      decode<Format>(walk, chunk);
      float* total = totals;
      for (int i = 0; i < panels_count; ++i) {
        any_tokens<offset_of(Format)>(
            panels[i].width, chunk, reinterpret_cast<const float*>(panels[i].data), columns, total);
        total += panels[i].width * 32;
      }
    }
    const float* total = totals;
    for (int i = 0; i < panels_count; ++i) {
      float* acc =
          panels[i].acc + static_cast<std::size_t>(block * panels[i].width) * kRowsPerBlock;
      for (int token = 0; token < panels[i].width; ++token, total += 32, acc += kRowsPerBlock) {
        const __m256 slots[4] = {_mm256_load_ps(total), _mm256_load_ps(total + 8),
                                 _mm256_load_ps(total + 16), _mm256_load_ps(total + 24)};
        Groups::put_rows(acc, slots);
      }
    }
  }
};

}  // namespace
}  // namespace freetoken::exec
