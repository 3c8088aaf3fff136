// Codes of each format as singles, one register per column, lane = row (AVX-512 F, BW, VL).
//
// step(at, sink) decodes 16 rows of kStepColumns columns and hands them on column by column.
#pragma once
#include <immintrin.h>

#include <cstddef>

#include "stream_codes.h"
#include "weight_format.h"

namespace freetoken::exec {
namespace {

// 32-bit lanes shifted right, or left for a negative Bits.
template <int Bits>
inline __attribute__((always_inline)) __m512i shifted(__m512i lanes) {
  if constexpr (Bits > 0) return _mm512_srli_epi32(lanes, Bits);
  if constexpr (Bits < 0) return _mm512_slli_epi32(lanes, -Bits);
  return lanes;
}

// Bit at which the code of a column of a step of eight begins (the order is that of weight files).
inline constexpr int kNibbleBit[8] = {0, 16, 4, 20, 8, 24, 12, 28};

// Values of the 4-bit codes.
template <WeightKind Kind>
inline __attribute__((always_inline)) __m512 nibble_values() {
  if constexpr (Kind == WeightKind::kInt4) {
    return _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  } else if constexpr (Kind == WeightKind::kQ4K) {
    return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  } else {
    return _mm512_setr_ps(0, 0.5F, 1, 1.5F, 2, 3, 4, 6, -0.0F, -0.5F, -1, -1.5F, -2, -3, -4, -6);
  }
}

// 4-bit codes: mxfp4, nvfp4, int4, q4_K.
template <WeightKind Kind>
struct Avx512Codes {
  static constexpr std::size_t kStepColumns = 8;
  static constexpr std::size_t kStepBytes = 64;
  static constexpr float kScaleFactor = 1.0F;

  const __m512 values = nibble_values<Kind>();

  template <class Sink>
  inline __attribute__((always_inline)) void step(const std::byte* at, const Sink& sink) const {
    const __m512i codes = _mm512_loadu_si512(at);
    column<0>(codes, sink);
    column<1>(codes, sink);
    column<2>(codes, sink);
    column<3>(codes, sink);
    column<4>(codes, sink);
    column<5>(codes, sink);
    column<6>(codes, sink);
    column<7>(codes, sink);
  }

 private:
  template <int Column, class Sink>
  inline __attribute__((always_inline)) void column(__m512i codes, const Sink& sink) const {
    // The permutation reads the low four bits of every lane.
    sink(Constant<Column>{}, _mm512_permutexvar_ps(shifted<kNibbleBit[Column]>(codes), values));
  }
};

// 2^24 times the codes: each stays in the top byte of its lane.
template <>
struct Avx512Codes<WeightKind::kInt8> {
  static constexpr std::size_t kStepColumns = 4;
  static constexpr std::size_t kStepBytes = 64;
  static constexpr float kScaleFactor = 0x1p-24F;

  template <class Sink>
  inline __attribute__((always_inline)) void step(const std::byte* at, const Sink& sink) const {
    const __m512i codes = _mm512_loadu_si512(at);
    sink(Constant<0>{}, _mm512_cvtepi32_ps(_mm512_slli_epi32(codes, 24)));
    sink(Constant<1>{}, top_byte(_mm512_slli_epi32(codes, 16)));
    sink(Constant<2>{}, top_byte(_mm512_slli_epi32(codes, 8)));
    sink(Constant<3>{}, top_byte(codes));
  }

 private:
  static __m512 top_byte(__m512i lanes) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(lanes, _mm512_set1_epi32(-0x1000000)));
  }
};

// As half precision with its exponent 8 too small: exact, subnormal codes too.
template <>
struct Avx512Codes<WeightKind::kFp8Block> {
  static constexpr std::size_t kStepColumns = 4;
  static constexpr std::size_t kStepBytes = 64;
  static constexpr float kScaleFactor = 256.0F;

  template <class Sink>
  inline __attribute__((always_inline)) void step(const std::byte* at, const Sink& sink) const {
    pair<0>(at, sink);
    pair<2>(at + 32, sink);
  }

 private:
  // 16 rows of two bytes.
  template <int First, class Sink>
  static inline __attribute__((always_inline)) void pair(const std::byte* at, const Sink& sink) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    sink(Constant<First>{}, high_byte(_mm256_slli_epi16(codes, 8)));
    sink(Constant<First + 1>{}, high_byte(codes));
  }

  static __m512 high_byte(__m256i words) {
    // The sign stays, a copy of it comes below, where the half has its fifth bit of exponent.
    const __m256i halves =
        _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(-0x4080));
    return _mm512_cvtph_ps(halves);
  }
};

template <>
struct Avx512Codes<WeightKind::kQ6K> {
  static constexpr std::size_t kStepColumns = 16;
  static constexpr std::size_t kStepBytes = 192;
  static constexpr float kScaleFactor = 1.0F;

  template <class Sink>
  inline __attribute__((always_inline)) void step(const std::byte* at, const Sink& sink) const {
    const __m512i plane = _mm512_loadu_si512(at);
    eight<0>(_mm512_loadu_si512(at + 64), plane, sink);
    eight<8>(_mm512_loadu_si512(at + 128), plane, sink);
  }

 private:
  template <int First, class Sink>
  static inline __attribute__((always_inline)) void eight(__m512i low, __m512i plane,
                                                          const Sink& sink) {
    column<First, 0>(low, plane, sink);
    column<First, 1>(low, plane, sink);
    column<First, 2>(low, plane, sink);
    column<First, 3>(low, plane, sink);
    column<First, 4>(low, plane, sink);
    column<First, 5>(low, plane, sink);
    column<First, 6>(low, plane, sink);
    column<First, 7>(low, plane, sink);
  }

  template <int First, int Column, class Sink>
  static inline __attribute__((always_inline)) void column(__m512i low, __m512i plane,
                                                           const Sink& sink) {
    // The two high bits lie in the byte of the nibble: of step 0 at 0 and 2, of step 1 at 4 and 6.
    constexpr int kBit = kNibbleBit[Column];
    constexpr int kHighBit = kBit / 8 * 8 + kBit % 8 / 2 + First / 2;
    const __m512i nibble = shifted<kBit>(low);
    const __m512i high = shifted<kHighBit - 4>(plane);
    // Low four bits from the one, the others from the other.
    const __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi32(15), nibble, high, 0xca);
    const __m512i code = _mm512_and_si512(both, _mm512_set1_epi32(63));
    sink(Constant<First + Column>{},
         _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(32))));
  }
};

}  // namespace
}  // namespace freetoken::exec
