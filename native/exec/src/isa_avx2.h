// Sixteen lanes as two AVX2 registers (AVX2 + FMA).
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "bf16.h"

namespace freetoken::exec {
namespace {

struct Avx2Isa {
  static constexpr const char* kName = "avx2";
  // Widest panel and row blocks per inner loop: at least 8 accumulators where they fit (two pipes
  // times four cycles of FMA latency), at most 10: with 12 the 16 registers spill (measured: 65
  // instead of 97 GFLOP/s at width 6).
  static constexpr std::size_t kMaxWidth = 5;
  static constexpr std::size_t row_blocks(std::size_t width) {
    return width == 1 ? 4 : width == 2 ? 2 : 1;
  }

  struct F {
    __m256 lo, hi;
  };

  static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static __m256 widen(const Bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static F load_bf16(const Bf16* p) { return {widen(p), widen(p + 8)}; }
  static void store(float* p, F a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
  }
  static F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  static F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
  static F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  static F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
  static F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
  static F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
  static F fma(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  static __m256 power_of_two(__m256 a) {
    const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(a), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(shifted, _mm256_set1_epi32(0x3f800000)));
  }
  static F power_of_two(F a) { return {power_of_two(a.lo), power_of_two(a.hi)}; }
  static float reduce_add(F a) {
    const __m256 eight = _mm256_add_ps(a.lo, a.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static float reduce_max(F a) {
    const __m256 eight = _mm256_max_ps(a.lo, a.hi);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

  using Activation = float;
  using W = F;
  static constexpr int kSteps = 2;
  template <int Step>
  static __m256 half(const std::byte* p) {
    const __m256i pairs = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
    if constexpr (Step == 0) {
      return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    } else {
      return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
    }
  }
  template <int Step>
  static W decode(const std::byte* pair) {
    return {half<Step>(pair), half<Step>(pair + 32)};
  }
  static F accumulate(F acc, W w, const Activation* x) {
    const __m256 value = _mm256_broadcast_ss(x);
    return {_mm256_fmadd_ps(w.lo, value, acc.lo), _mm256_fmadd_ps(w.hi, value, acc.hi)};
  }
  // GCC takes a function that only prefetches for one without effect and drops calls of it.
  static inline __attribute__((always_inline)) void prefetch(const std::byte* address) {
    _mm_prefetch(address, _MM_HINT_T0);
  }

  // One cache line of a stream, mixed into `sum`.
  using Line = __m256i;
  static Line mix(Line sum, const std::byte* line) {
    const auto* halves = reinterpret_cast<const __m256i*>(line);
    const __m256i both = _mm256_xor_si256(_mm256_load_si256(halves), _mm256_load_si256(halves + 1));
    return _mm256_xor_si256(sum, both);
  }
  static std::uint64_t fold(Line sum) {
    return static_cast<std::uint64_t>(_mm256_extract_epi64(sum, 0) ^ _mm256_extract_epi64(sum, 1) ^
                                      _mm256_extract_epi64(sum, 2) ^ _mm256_extract_epi64(sum, 3));
  }
};

}  // namespace
}  // namespace freetoken::exec
