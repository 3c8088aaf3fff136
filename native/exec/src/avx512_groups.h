// Scales of 16 rows as AVX-512 registers (F, BW, VL).
#pragma once
#include <immintrin.h>

#include <cstddef>

#include "block_groups.h"
#include "isa_avx512.h"

namespace freetoken::exec {
namespace {

struct Avx512Loads {
  static __m128i sixteen(const std::byte* at) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  }
  static __m512 bytes(const std::byte* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen(at)));
  }
  static __m512 signed_bytes(const std::byte* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen(at)));
  }
  static __m512 halves(const std::byte* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  }
  // Through half precision, whose exponent is 8 larger: right for subnormal codes too, and without
  // the subnormal singles that cost an assist.
  static __m512 e4m3(const std::byte* at) {
    const __m256i codes = _mm256_slli_epi16(_mm256_cvtepu8_epi16(sixteen(at)), 8);
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(codes, 1), _mm256_set1_epi16(-0x4080));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0F));
  }
  // 2^(code - 127); code 0 is the subnormal 2^-127.
  static __m512 e8m0(const std::byte* at) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_cvtepu8_epi32(sixteen(at)), 23);
    return _mm512_castsi512_ps(_mm512_max_epu32(exponent, _mm512_set1_epi32(0x00400000)));
  }
};

template <WeightKind Kind>
using Avx512Groups = BlockGroups<Kind, Avx512Isa, Avx512Loads>;

}  // namespace
}  // namespace freetoken::exec
