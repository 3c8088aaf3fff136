// As many fp32 multiply-adds as the vector units take: the ceiling of products that are summed in
// fp32. Twelve independent chains hide the latency of each.
#include <immintrin.h>

#define CHAINS 12

// 12 * 8 multiply-adds per iteration; returns what has to come out of any of them.
__attribute__((target("avx2,fma"))) float fma_chains(long iterations) {
  __m256 sums[CHAINS];
  const __m256 keep = _mm256_set1_ps(0.5F);
  const __m256 one = _mm256_set1_ps(1.0F);
#pragma GCC unroll 12
  for (int i = 0; i < CHAINS; ++i) sums[i] = _mm256_setzero_ps();
  for (long n = 0; n < iterations; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; ++i) {
      sums[i] = _mm256_fmadd_ps(sums[i], keep, one);
      // Each chain in a register of its own, and no two of them merged as equal.
      __asm__ volatile("" : "+x"(sums[i]));
    }
  }
  __m256 least = sums[0];
#pragma GCC unroll 12
  for (int i = 1; i < CHAINS; ++i) least = _mm256_min_ps(least, sums[i]);
  return _mm256_cvtss_f32(least);
}
