// Groups of columns of 16 rows: scales as the slots of a codec want them, how a group's sum begins
// and how it is added to the total.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "avx2_codecs.h"
#include "avx2_panel.h"
#include "avx2_scales.h"

namespace freetoken::exec {
namespace {

// Codes are prefetched this far ahead: the hardware does not look beyond a page. (Measured on
// Zen 3: 512 is too near.)
inline constexpr std::size_t kCodesAheadBytes = 2048;

// What `RowScales::offset` is for.
enum class Offset { kNone, kBeforeScale, kAfterScale };

static constexpr Offset offset_of(const WeightFormat& format) {
  return format.kind == WeightKind::kQ4K ? Offset::kAfterScale
         : format.zero_points            ? Offset::kBeforeScale
                                         : Offset::kNone;
}

// Scales and offsets of one group of 16 rows as the slots want them.
struct SlotScales {
  __m256 scale[4];
  __m256 offset[4];
};

// `Codec` made the panels; `Arranged` has its values, perhaps in other slots.
template <class Codec, class Arranged>
struct Avx2Groups {
  using Panel = SummedPanel<Codec>;
  static constexpr float kTotalUnit = Codec::kUnit / Codec::kInput;

  template <WeightFormat Format, int Slot>
  static inline __attribute__((always_inline)) void spread(const RowScales& rows, SlotScales& out) {
    constexpr Offset kUse = offset_of(Format);
    out.scale[Slot] = Arranged::template spread<Slot>(rows.scale[Slot / 2]);
    if constexpr (kUse != Offset::kNone) {
      out.offset[Slot] = Arranged::template spread<Slot>(rows.offset[Slot / 2]);
    }
  }

  template <WeightFormat Format>
  static inline __attribute__((always_inline)) void scales(const GroupWalk& walk, SlotScales& out) {
    RowScales rows{};
    load_scales(Format, walk.header(), walk.within(), 0, rows);
    load_scales(Format, walk.header(), walk.within(), 1, rows);
    spread<Format, 0>(rows, out);
    spread<Format, 1>(rows, out);
    spread<Format, 2>(rows, out);
    spread<Format, 3>(rows, out);
  }

  // The sums of 16 rows.
  static void put_rows(float* out, const __m256 (&slots)[4]) {
    const __m256 unit = _mm256_set1_ps(kTotalUnit);
    Arranged::put(out, _mm256_mul_ps(Arranged::rows(slots[0], slots[1]), unit),
                  _mm256_mul_ps(Arranged::rows(slots[2], slots[3]), unit));
  }

  // What stands in the panel for `count` columns and one of `Width` tokens (Panel::numbers), added
  // up as a slot wants it.
  template <std::size_t Width, int Slot>
  static inline __attribute__((always_inline)) __m256 of_group(const float* numbers,
                                                               std::size_t count) {
    __m256 all = Arranged::template factor<Slot>(numbers);
    for (std::size_t i = Codec::kSumColumns; i < count; i += Codec::kSumColumns) {
      numbers += Panel::kNumbers * Width;
      all = _mm256_add_ps(all, Arranged::template factor<Slot>(numbers));
    }
    return all;
  }

  // What the group's sum of one slot begins with.
  template <std::size_t Width, int Slot>
  static inline __attribute__((always_inline)) __m256 initial(const float* numbers,
                                                              std::size_t count) {
    if constexpr (!Codec::kShifted) return _mm256_setzero_ps();
    return of_group<Width, Slot>(numbers + 2, count);
  }

  // total <- total + scale * sum (- offset) for one slot.
  template <Offset Use, std::size_t Width, int Slot>
  static inline __attribute__((always_inline)) __m256 finish(const SlotScales& scales, __m256 sum,
                                                             const float* numbers,
                                                             std::size_t count, __m256 total) {
    if constexpr (Use == Offset::kNone) return _mm256_fmadd_ps(scales.scale[Slot], sum, total);
    const __m256 all = of_group<Width, Slot>(numbers, count);
    if constexpr (Use == Offset::kBeforeScale) {
      sum = _mm256_fnmadd_ps(scales.offset[Slot], all, sum);
      return _mm256_fmadd_ps(scales.scale[Slot], sum, total);
    }
    total = _mm256_fmadd_ps(scales.scale[Slot], sum, total);
    return _mm256_fnmadd_ps(scales.offset[Slot], all, total);
  }

  // All steps of a group; the last one of fp8_block may be half there.
  template <std::size_t Unrolled, std::size_t Ahead, class Sink, class Advance>
  static inline __attribute__((always_inline)) void steps(Code codes, std::size_t count, Sink& sink,
                                                          Advance advance) {
    std::size_t done = 0;
    for (; done + Unrolled <= count; done += Unrolled) {
#pragma GCC unroll 8
      for (std::size_t step = 0; step < Unrolled; step += Arranged::kStepColumns) {
        for (std::size_t line = 0; line < Arranged::kStepBytes; line += 64) {
          _mm_prefetch(codes + Ahead + line, _MM_HINT_T0);
        }
        Arranged::step(codes, sink);
        advance();
        codes += Arranged::kStepBytes;
      }
    }
    for (; done < count; done += Arranged::kStepColumns) {
      alignas(32) std::uint8_t last[Arranged::kStepBytes] = {};
      const std::size_t left = count - done;
      std::memcpy(last, codes,
                  left < Arranged::kStepColumns ? Arranged::kStepBytes / 2 : Arranged::kStepBytes);
      Arranged::step(last, sink);
      advance();
      codes += Arranged::kStepBytes;
    }
  }
};

}  // namespace
}  // namespace freetoken::exec
