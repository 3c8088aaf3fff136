// Sixteen lanes of four bytes as two registers (AVX2, AVX-VNNI), and scales of 16 rows.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "block_groups.h"
#include "isa_avx2.h"

namespace freetoken::exec {
namespace {

struct AvxVnniInts {
  struct I {
    __m256i lo, hi;
  };
  static constexpr std::size_t max_width(std::size_t digits) { return digits == 1 ? 4 : 2; }
  // Two registers each are chains enough.
  static constexpr std::size_t chains(std::size_t /*digits*/) { return 1; }
  // Sums of two blocks fit into the registers.
  static constexpr std::size_t blocks_at_once(std::size_t width) { return width == 1 ? 2 : 1; }

  static __m256i half(const std::byte* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  }
  static I load(const std::byte* at) { return {half(at), half(at + 32)}; }
  static I set1(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static I bytes16(__m128i bytes) {
    const __m256i both = _mm256_broadcastsi128_si256(bytes);
    return {both, both};
  }
  static I add(I a, I b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
  static Avx2Isa::F to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
  // The low bytes of 32-bit lanes.
  static __m128i low_bytes(I a) {
    const __m256i mask = _mm256_set1_epi32(255);
    const __m256i halves = _mm256_permute4x64_epi64(
        _mm256_packus_epi32(_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)), 0xd8);
    return _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  }
  static I words(Avx2Isa::F a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
  static void digits(Avx2Isa::F a, __m128i (&out)[1]) { out[0] = low_bytes(words(a)); }
  // Each digit but the last from -128 to 127.
  static void digits(Avx2Isa::F a, __m128i (&out)[3]) {
    const I first = words(a);
    const I second = next_digit(first);
    out[0] = low_bytes(first);
    out[1] = low_bytes(second);
    out[2] = low_bytes(next_digit(second));
  }
  static I next_digit(I a) {
    const I sum = add(a, set1(128));
    return {_mm256_srai_epi32(sum.lo, 8), _mm256_srai_epi32(sum.hi, 8)};
  }
  static I times_256(I a) { return {_mm256_slli_epi32(a.lo, 8), _mm256_slli_epi32(a.hi, 8)}; }
  // 16-bit lanes shifted right, or left for a negative Bits.
  template <int Bits>
  static I right(I a) {
    if constexpr (Bits > 0) return {_mm256_srli_epi16(a.lo, Bits), _mm256_srli_epi16(a.hi, Bits)};
    return {_mm256_slli_epi16(a.lo, -Bits), _mm256_slli_epi16(a.hi, -Bits)};
  }
  static I both_and(I a, __m256i mask) {
    return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
  }
  static I low_nibbles(I a) { return both_and(a, _mm256_set1_epi8(15)); }
  static I lookup(I table, I index) {
    return {_mm256_shuffle_epi8(table.lo, index.lo), _mm256_shuffle_epi8(table.hi, index.hi)};
  }
  static I flip_signs(I a) {
    const __m256i sign = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(a.lo, sign), _mm256_xor_si256(a.hi, sign)};
  }
  // Bits 0-3 of every byte of `low`, 4-5 of `high`.
  static I with_bits_4_5(I low, I high) {
    const I nibbles = low_nibbles(low);
    const I top = both_and(high, _mm256_set1_epi8(0x30));
    return {_mm256_or_si256(nibbles.lo, top.lo), _mm256_or_si256(nibbles.hi, top.hi)};
  }
  // sum + four unsigned bytes of w times four signed bytes, the same in every lane.
  static I dot(I sum, I w, const std::int32_t* x) {
    const __m256i value = _mm256_set1_epi32(*x);
    return {_mm256_dpbusd_avx_epi32(sum.lo, w.lo, value),
            _mm256_dpbusd_avx_epi32(sum.hi, w.hi, value)};
  }
};

struct AvxVnniLoads {
  using F = Avx2Isa::F;

  static __m128i eight(const std::byte* at) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
  }
  static __m128i sixteen(const std::byte* at) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  }
  static F bytes(const std::byte* at) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight(at))),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight(at + 8)))};
  }
  static F signed_bytes(const std::byte* at) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(at))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(at + 8)))};
  }
  static F halves(const std::byte* at) {
    return {_mm256_cvtph_ps(sixteen(at)), _mm256_cvtph_ps(sixteen(at + 16))};
  }
  // Through half precision, whose exponent is 8 larger: right for subnormal codes too, and without
  // the subnormal singles that cost an assist.
  static F e4m3(const std::byte* at) {
    const __m256i codes = _mm256_slli_epi16(_mm256_cvtepu8_epi16(sixteen(at)), 8);
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(codes, 1), _mm256_set1_epi16(-0x4080));
    const __m256 factor = _mm256_set1_ps(256.0F);
    return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), factor),
            _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), factor)};
  }
  // 2^(code - 127); code 0 is the subnormal 2^-127.
  static F e8m0(const std::byte* at) { return {e8m0_half(at), e8m0_half(at + 8)}; }
  static __m256 e8m0_half(const std::byte* at) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtepu8_epi32(eight(at)), 23);
    return _mm256_castsi256_ps(_mm256_max_epu32(exponent, _mm256_set1_epi32(0x00400000)));
  }
};

template <WeightKind Kind>
using AvxVnniGroups = BlockGroups<Kind, Avx2Isa, AvxVnniLoads>;

}  // namespace
}  // namespace freetoken::exec
