// Sixteen lanes of four bytes as one register (AVX-512 F, BW, VL, VNNI).
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace freetoken::exec {
namespace {

struct Avx512Ints {
  using I = __m512i;
  // As many sums as the registers hold beside totals and codes.
  static constexpr std::size_t max_width(std::size_t digits) { return digits == 1 ? 8 : 6; }
  static constexpr std::size_t chains(std::size_t digits) { return digits == 1 ? 2 : 1; }
  // A core reads several streams faster than one.
  static constexpr std::size_t blocks_at_once(std::size_t width) {
    return width == 1 ? 4 : width <= 3 ? 2 : 1;
  }

  static I load(const std::byte* at) { return _mm512_loadu_si512(at); }
  static I set1(std::int32_t x) { return _mm512_set1_epi32(x); }
  static I bytes16(__m128i bytes) { return _mm512_broadcast_i32x4(bytes); }
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static __m512 to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static __m512i words(__m512 a) { return _mm512_cvtps_epi32(a); }
  static void digits(__m512 a, __m128i (&out)[1]) { out[0] = _mm512_cvtepi32_epi8(words(a)); }
  // Each digit but the last from -128 to 127.
  static void digits(__m512 a, __m128i (&out)[3]) {
    const __m512i half = _mm512_set1_epi32(128);
    const __m512i first = words(a);
    const __m512i second = _mm512_srai_epi32(_mm512_add_epi32(first, half), 8);
    const __m512i third = _mm512_srai_epi32(_mm512_add_epi32(second, half), 8);
    out[0] = _mm512_cvtepi32_epi8(first);
    out[1] = _mm512_cvtepi32_epi8(second);
    out[2] = _mm512_cvtepi32_epi8(third);
  }
  static I times_256(I a) { return _mm512_slli_epi32(a, 8); }
  // 16-bit lanes shifted right, or left for a negative Bits.
  template <int Bits>
  static I right(I a) {
    if constexpr (Bits > 0) return _mm512_srli_epi16(a, Bits);
    return _mm512_slli_epi16(a, -Bits);
  }
  static I low_nibbles(I a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
  static I lookup(I table, I index) { return _mm512_shuffle_epi8(table, index); }
  static I flip_signs(I a) { return _mm512_xor_si512(a, _mm512_set1_epi8(-128)); }
  // Bits 0-3 of every byte of `low`, 4-5 of `high`.
  static I with_bits_4_5(I low, I high) {
    const I both = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low, high, 0xca);
    return _mm512_and_si512(both, _mm512_set1_epi8(63));
  }
  // sum + four unsigned bytes of w times four signed bytes, the same in every lane.
  static I dot(I sum, I w, const std::int32_t* x) {
    return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(*x));
  }
};

}  // namespace
}  // namespace freetoken::exec
