// Sixteen lanes as one AVX-512 register (F, BW, VL): bf16 widened to single, then FMA.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "bf16.h"

namespace freetoken::exec {
namespace {

struct Avx512Isa {
  static constexpr const char* kName = "avx512";
  // 12 to 20 accumulators where they fit: of 32 registers the compiler spills from 22 on.
  static constexpr std::size_t kMaxWidth = 8;
  static constexpr std::size_t row_blocks(std::size_t width) { return width <= 5 ? 4 : 2; }

  using F = __m512;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load_bf16(const Bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F power_of_two(F a) {
    const __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(a), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(0x3f800000)));
  }
  static __m256 upper(F a) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
  }
  static float reduce_add(F a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), upper(a));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static float reduce_max(F a) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a), upper(a));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  using Activation = float;
  using W = F;
  static constexpr int kSteps = 2;
  // Whether 32 columns have sums of their own within a group that has more.
  static constexpr bool kSumsOf32 = false;
  static F load_activations(const Bf16* p) { return load_bf16(p); }
  template <int Step>
  static W decode(const std::byte* pair) {
    const __m512i pairs = _mm512_load_si512(pair);
    if constexpr (Step == 0) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    } else {
      return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
    }
  }
  static F accumulate(F acc, W w, const Activation* x) {
    return _mm512_fmadd_ps(w, _mm512_set1_ps(*x), acc);
  }
  // GCC takes a function that only prefetches for one without effect and drops calls of it.
  static inline __attribute__((always_inline)) void prefetch(const std::byte* address) {
    _mm_prefetch(address, _MM_HINT_T0);
  }

  // One cache line of a stream, mixed into `sum`.
  using Line = __m512i;
  static Line mix(Line sum, const std::byte* line) {
    return _mm512_xor_si512(sum, _mm512_load_si512(line));
  }
  static std::uint64_t fold(Line sum) {
    alignas(64) std::uint64_t words[8];
    _mm512_store_si512(words, sum);
    std::uint64_t all = 0;
    for (const std::uint64_t word : words) all ^= word;
    return all;
  }
};

}  // namespace
}  // namespace freetoken::exec
