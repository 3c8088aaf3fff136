// Products of the formats with scales for a few tokens where there are AMX tiles: in the vector
// units, whose FMA needs less time than filling tiles does, with the sums that tiles would give.
//
// tdpbf16ps adds the even and the odd columns of 32 apart, each by fused multiply-adds, then both to
// the sum; so do these. Subnormal activations count as zero, as there. (A product below the normal
// numbers is zero in tiles only: it takes activations below 2^-116.)
#pragma once
#include <immintrin.h>

#include <cstddef>

#include "avx512_bf16_codes.h"
#include "avx512_codes.h"
#include "avx512_products.h"
#include "isa_avx512.h"

namespace freetoken::exec {
namespace {

struct AmxNarrowIsa : Avx512Isa {
  static constexpr bool kSumsOf32 = true;

  static F load_activations(const Bf16* p) {
    const F values = load_bf16(p);
    const __m512i exponent =
        _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7f800000));
    return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(exponent, exponent), values);
  }
};

// Pairs of columns in bf16 as two columns of singles.
template <WeightKind Kind>
struct WidenedCodes {
  using Pairs = Avx512Bf16Codes<Kind>;
  static constexpr std::size_t kStepColumns = Pairs::kStepColumns;
  static constexpr std::size_t kStepBytes = Pairs::kStepBytes;
  static constexpr float kScaleFactor = Pairs::kScaleFactor;

  const Pairs pairs{};

  template <class Sink>
  inline __attribute__((always_inline)) void step(const std::byte* at, const Sink& sink) const {
    pairs.step(
        at, [&](auto unit, __m512i pair) __attribute__((always_inline)) {
          constexpr int kColumn = 2 * decltype(unit)::value;
          const __m512i odd = _mm512_and_si512(pair, _mm512_set1_epi32(-0x10000));
          sink(Constant<kColumn>{}, _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)));
          sink(Constant<kColumn + 1>{}, _mm512_castsi512_ps(odd));
        });
  }
};

// Where looking pairs up takes fewer instructions than converting columns.
template <WeightKind Kind>
struct AmxNarrowCodes : Avx512Codes<Kind> {};
template <>
struct AmxNarrowCodes<WeightKind::kFp8Block> : WidenedCodes<WeightKind::kFp8Block> {};
template <>
struct AmxNarrowCodes<WeightKind::kQ6K> : WidenedCodes<WeightKind::kQ6K> {};

using AmxNarrow = Avx512Products<AmxNarrowIsa, AmxNarrowCodes>;

}  // namespace
}  // namespace freetoken::exec
