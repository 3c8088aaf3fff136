// What one core can do at most, each loop bound by one thing: the latency of an addition (the
// clock), the width of the core, the rate at which it reads so many streams.
#include <immintrin.h>
#include <stdint.h>

// 64 additions per iteration, each waiting for the one before; returns 64 * iterations. The addend
// is a register: newer cores fold additions of constants.
uint64_t dependent_additions(long iterations) {
  uint64_t sum = 0;
  const uint64_t one = 1;
  for (long n = 0; n < iterations; ++n) {
    __asm__ volatile(".rept 64\n add %1, %0\n .endr" : "+r"(sum) : "r"(one));
  }
  return sum;
}

// 64 additions per iteration in eight chains; returns 64 * iterations.
uint64_t independent_additions(long iterations) {
  uint64_t a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
  const uint64_t one = 1;
  for (long n = 0; n < iterations; ++n) {
    __asm__ volatile(
        ".rept 8\n add %8, %0\n add %8, %1\n add %8, %2\n add %8, %3\n"
        "add %8, %4\n add %8, %5\n add %8, %6\n add %8, %7\n .endr"
        : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f), "+r"(g), "+r"(h)
        : "r"(one));
  }
  return a + b + c + d + e + f + g + h;
}

#define LINE 64

__attribute__((target("avx2"), always_inline)) static inline uint64_t read_interleaved(
    const char* data, long stream_bytes, const int streams) {
  __m256i sums[8];
  for (int s = 0; s < 2 * streams; ++s) sums[s] = _mm256_setzero_si256();
  for (long at = 0; at < stream_bytes; at += LINE) {
#pragma GCC unroll 4
    for (int s = 0; s < streams; ++s) {
      const __m256i* line = (const __m256i*)(data + s * stream_bytes + at);
      sums[2 * s] = _mm256_add_epi64(sums[2 * s], _mm256_load_si256(line));
      sums[2 * s + 1] = _mm256_add_epi64(sums[2 * s + 1], _mm256_load_si256(line + 1));
    }
  }
  uint64_t sum = 0;
  for (int s = 0; s < 2 * streams; ++s) {
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i*)lanes, sums[s]);
    sum += lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }
  return sum;
}

// The sum of all 64-bit words, read as 1, 2 or 4 streams a line of each in turn, with loads alone.
// `data` and length_bytes / streams: multiples of 64.
__attribute__((target("avx2"))) uint64_t read_streams(const char* data, long length_bytes,
                                                      int streams) {
  switch (streams) {
    case 1:
      return read_interleaved(data, length_bytes, 1);
    case 2:
      return read_interleaved(data, length_bytes / 2, 2);
    default:
      return read_interleaved(data, length_bytes / 4, 4);
  }
}
