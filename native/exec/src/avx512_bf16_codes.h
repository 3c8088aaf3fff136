// Codes of each format as pairs of bf16, one register per two columns, lane = row (AVX-512 F, BW,
// VL, VBMI). Every code is exact in bf16, and none is subnormal there: vdpbf16ps takes those as 0.
//
// step(at, sink) decodes 16 rows of kStepColumns columns and hands them on pair by pair.
#pragma once
#include <immintrin.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "bf16.h"
#include "stream_codes.h"
#include "weight_format.h"

namespace freetoken::exec {
namespace {

inline constexpr std::size_t kTableWords = 32;
inline constexpr std::size_t kTableBytes = 128;

constexpr Bf16 exact_bf16(float value) {
  return static_cast<Bf16>(std::bit_cast<std::uint32_t>(value) >> 16);
}

template <WeightKind Kind>
constexpr float nibble_value(std::size_t code) {
  constexpr float kE2m1[8] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  if (Kind == WeightKind::kInt4) return static_cast<float>(static_cast<int>(code) - 8);
  if (Kind == WeightKind::kQ4K) return static_cast<float>(code);
  return code < 8 ? kE2m1[code] : -kE2m1[code - 8];
}

// Twice the same sixteen values: the permutation of 16-bit lanes reads five bits of an index.
template <WeightKind Kind>
constexpr std::array<Bf16, kTableWords> nibble_table() {
  std::array<Bf16, kTableWords> table{};
  for (std::size_t i = 0; i < kTableWords; ++i) table[i] = exact_bf16(nibble_value<Kind>(i % 16));
  return table;
}

template <WeightKind Kind>
struct NibbleTable {
  alignas(64) static constexpr std::array<Bf16, kTableWords> kWords = nibble_table<Kind>();
};

// 4-bit codes: mxfp4, nvfp4, int4, q4_K.
template <WeightKind Kind>
struct Avx512Bf16Codes {
  static constexpr std::size_t kStepColumns = 8;
  static constexpr std::size_t kStepBytes = 64;
  static constexpr float kScaleFactor = 1.0F;

  const __m512i table = _mm512_load_si512(NibbleTable<Kind>::kWords.data());

  template <class Sink>
  inline __attribute__((always_inline)) void step(const std::byte* at, const Sink& sink) const {
    // 16-bit lanes hold the codes of columns 0 2 4 6 and of 1 3 5 7.
    const __m512i codes = _mm512_loadu_si512(at);
    sink(Constant<0>{}, _mm512_permutexvar_epi16(codes, table));
    sink(Constant<1>{}, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table));
    sink(Constant<2>{}, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), table));
    sink(Constant<3>{}, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), table));
  }
};

// The high and the low bytes of the bf16 values of 128 magnitudes.
struct ByteTable {
  alignas(64) std::array<std::uint8_t, kTableBytes> high{};
  alignas(64) std::array<std::uint8_t, kTableBytes> low{};

  constexpr void set(std::size_t index, float value) {
    high[index] = static_cast<std::uint8_t>(exact_bf16(value) >> 8);
    low[index] = static_cast<std::uint8_t>(exact_bf16(value) & 0xffU);
  }
};

constexpr ByteTable int8_table() {
  ByteTable table;
  for (std::size_t i = 0; i < kTableBytes; ++i) table.set(i, static_cast<float>(i));
  return table;
}

// Magnitude 127 is not a number; converters refuse it.
constexpr ByteTable e4m3_table() {
  ByteTable table;
  for (std::size_t i = 0; i < kTableBytes; ++i) {
    const auto mantissa = static_cast<float>(i % 8);
    float value = i < 8 ? mantissa / 8.0F : 1.0F + mantissa / 8.0F;
    for (std::size_t exponent = i < 8 ? 1 : i / 8; exponent > 7; --exponent) value *= 2.0F;
    for (std::size_t exponent = i < 8 ? 1 : i / 8; exponent < 7; ++exponent) value /= 2.0F;
    table.set(i, value);
  }
  return table;
}

inline constexpr ByteTable kInt8Table = int8_table();
inline constexpr ByteTable kE4m3Table = e4m3_table();

// High and low bytes by table, of 64 magnitudes.
struct ByteLookup {
  explicit ByteLookup(const ByteTable& table)
      : high_first(_mm512_load_si512(table.high.data())),
        high_second(_mm512_load_si512(table.high.data() + 64)),
        low_first(_mm512_load_si512(table.low.data())),
        low_second(_mm512_load_si512(table.low.data() + 64)) {}

  __m512i high(__m512i index) const {
    return _mm512_permutex2var_epi8(high_first, index, high_second);
  }
  __m512i low(__m512i index) const {
    return _mm512_permutex2var_epi8(low_first, index, low_second);
  }

  const __m512i high_first, high_second, low_first, low_second;
};

// high | (codes & sign bit)
inline __attribute__((always_inline)) __m512i with_sign(__m512i high, __m512i codes) {
  return _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), 0xf8);
}

template <>
struct Avx512Bf16Codes<WeightKind::kInt8> {
  static constexpr std::size_t kStepColumns = 4;
  static constexpr std::size_t kStepBytes = 64;
  static constexpr float kScaleFactor = 1.0F;

  const ByteLookup lookup{kInt8Table};
  // Of every four rows: columns 0 1 of each, then columns 2 3 of each.
  const __m512i pairs_apart =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));

  template <class Sink>
  inline __attribute__((always_inline)) void step(const std::byte* at, const Sink& sink) const {
    const __m512i codes = _mm512_shuffle_epi8(_mm512_loadu_si512(at), pairs_apart);
    const __m512i magnitude = _mm512_abs_epi8(codes);
    const __m512i low = lookup.low(magnitude);
    // 128 is looked up as 0; they differ in the high byte only.
    const __m512i looked_up = lookup.high(magnitude);
    const __m512i high = _mm512_mask_mov_epi8(looked_up, _mm512_movepi8_mask(magnitude),
                                              _mm512_set1_epi8(exact_bf16(128.0F) >> 8));
    const __m512i with = with_sign(high, codes);
    sink(Constant<0>{}, _mm512_unpacklo_epi8(low, with));
    sink(Constant<1>{}, _mm512_unpackhi_epi8(low, with));
  }
};

template <>
struct Avx512Bf16Codes<WeightKind::kFp8Block> {
  static constexpr std::size_t kStepColumns = 4;
  static constexpr std::size_t kStepBytes = 64;
  static constexpr float kScaleFactor = 1.0F;

  const ByteLookup lookup{kE4m3Table};
  // Of every four rows: columns 0 1 of each, then columns 2 3 of each.
  const __m512i pairs_together = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);

  template <class Sink>
  inline __attribute__((always_inline)) void step(const std::byte* at, const Sink& sink) const {
    const __m512i codes = _mm512_permutexvar_epi64(pairs_together, _mm512_loadu_si512(at));
    const __m512i low = lookup.low(codes);
    const __m512i high = with_sign(lookup.high(codes), codes);
    sink(Constant<0>{}, _mm512_unpacklo_epi8(low, high));
    sink(Constant<1>{}, _mm512_unpackhi_epi8(low, high));
  }
};

// code - 32 for the 64 codes.
constexpr std::array<Bf16, 2 * kTableWords> q6_table() {
  std::array<Bf16, 2 * kTableWords> table{};
  for (std::size_t i = 0; i < table.size(); ++i) {
    table[i] = exact_bf16(static_cast<float>(static_cast<int>(i) - 32));
  }
  return table;
}

alignas(64) inline constexpr std::array<Bf16, 2 * kTableWords> kQ6Table = q6_table();

template <>
struct Avx512Bf16Codes<WeightKind::kQ6K> {
  static constexpr std::size_t kStepColumns = 16;
  static constexpr std::size_t kStepBytes = 192;
  static constexpr float kScaleFactor = 1.0F;

  const __m512i negative = _mm512_load_si512(kQ6Table.data());
  const __m512i positive = _mm512_load_si512(kQ6Table.data() + kTableWords);
  const __m512i four_bits = _mm512_set1_epi16(15);

  template <class Sink>
  inline __attribute__((always_inline)) void step(const std::byte* at, const Sink& sink) const {
    const __m512i plane = _mm512_loadu_si512(at);
    const __m512i first = _mm512_loadu_si512(at + 64);
    const __m512i second = _mm512_loadu_si512(at + 128);
    // The high bits of a step's pairs of columns lie at 0, 2, 8 and 10; of the second step 4
    // higher.
    sink(Constant<0>{}, pairs(first, _mm512_slli_epi16(plane, 4)));
    sink(Constant<1>{}, pairs(_mm512_srli_epi16(first, 4), _mm512_slli_epi16(plane, 2)));
    sink(Constant<2>{}, pairs(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(plane, 4)));
    sink(Constant<3>{}, pairs(_mm512_srli_epi16(first, 12), _mm512_srli_epi16(plane, 6)));
    sink(Constant<4>{}, pairs(second, plane));
    sink(Constant<5>{}, pairs(_mm512_srli_epi16(second, 4), _mm512_srli_epi16(plane, 2)));
    sink(Constant<6>{}, pairs(_mm512_srli_epi16(second, 8), _mm512_srli_epi16(plane, 8)));
    sink(Constant<7>{}, pairs(_mm512_srli_epi16(second, 12), _mm512_srli_epi16(plane, 10)));
  }

 private:
  // Bits 0-3 of `low` and 4-5 of `high` are the code; the permutation reads six bits.
  inline __attribute__((always_inline)) __m512i pairs(__m512i low, __m512i high) const {
    const __m512i codes = _mm512_ternarylogic_epi32(four_bits, low, high, 0xca);
    return _mm512_permutex2var_epi16(negative, codes, positive);
  }
};

}  // namespace
}  // namespace freetoken::exec
