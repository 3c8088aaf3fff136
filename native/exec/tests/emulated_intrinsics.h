// EMULATION for tests: the AVX-512 and AMX intrinsics that the kernels use, in plain C++, so that
// the kernels' sources compile and run on machines without these instructions. Written from the
// operation sections of Intel's manual. A test that passes with it shows that the kernels are
// right if the instructions do what the manual says; it says nothing of their speed.
//
// Functions of the same names in namespace freetoken::exec hide the compiler's own. Include this
// before any kernel.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

// Intrinsics with immediate operands are macros in builds without optimisation.
#undef _mm512_slli_epi16
#undef _mm512_slli_epi32
#undef _mm512_srli_epi16
#undef _mm512_srli_epi32
#undef _mm512_srai_epi32
#undef _mm512_extractf64x4_pd
#undef _mm512_extracti64x4_epi64
#undef _mm512_ternarylogic_epi32
// These are macros always.
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd

namespace freetoken::exec {
namespace {

using U8x64 = unsigned char __attribute__((vector_size(64)));
using S8x64 = signed char __attribute__((vector_size(64)));
using U16x32 = unsigned short __attribute__((vector_size(64)));
using S32x16 = int __attribute__((vector_size(64)));
using U32x16 = unsigned __attribute__((vector_size(64)));
using U64x8 = unsigned long long __attribute__((vector_size(64)));

// Calls, not copies: the kernels unroll so much that inlining would take a minute to compile.
#define FREETOKEN_EMULATED [[maybe_unused]] static __attribute__((noinline))

template <class To, class From>
inline __attribute__((always_inline)) To as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  return reinterpret_cast<To>(value);
}

template <class Lanes>
inline __attribute__((always_inline)) __m512i as_integers(Lanes value) {
  return as<__m512i>(value);
}

// --- singles
FREETOKEN_EMULATED __m512 _mm512_setzero_ps() { return __m512{}; }
FREETOKEN_EMULATED __m512 _mm512_set1_ps(float x) { return __m512{} + x; }
FREETOKEN_EMULATED __m512 _mm512_setr_ps(float a, float b, float c, float d, float e, float f,
                                         float g, float h, float i, float j, float k, float l,
                                         float m, float n, float o, float p) {
  return __m512{a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
}
FREETOKEN_EMULATED __m512 _mm512_loadu_ps(const void* at) {
  __m512 value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
FREETOKEN_EMULATED void _mm512_storeu_ps(void* at, __m512 value) {
  std::memcpy(at, &value, sizeof value);
}
FREETOKEN_EMULATED __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
FREETOKEN_EMULATED __m512 _mm512_sub_ps(__m512 a, __m512 b) { return a - b; }
FREETOKEN_EMULATED __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
FREETOKEN_EMULATED __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
FREETOKEN_EMULATED __m512 _mm512_min_ps(__m512 a, __m512 b) { return a < b ? a : b; }
FREETOKEN_EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
FREETOKEN_EMULATED __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < 16; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
FREETOKEN_EMULATED __m512 _mm512_fnmadd_ps(__m512 a, __m512 b, __m512 c) {
  return _mm512_fmadd_ps(-a, b, c);
}
FREETOKEN_EMULATED __m512 _mm512_permutexvar_ps(__m512i index, __m512 table) {
  const auto lanes = as<U32x16>(index);
  __m512 value;
  for (int i = 0; i < 16; ++i) value[i] = table[lanes[i] & 15U];
  return value;
}

// --- casts, halves of registers
FREETOKEN_EMULATED __m512 _mm512_castsi512_ps(__m512i a) { return as<__m512>(a); }
FREETOKEN_EMULATED __m512i _mm512_castps_si512(__m512 a) { return as<__m512i>(a); }
FREETOKEN_EMULATED __m512d _mm512_castps_pd(__m512 a) { return as<__m512d>(a); }
FREETOKEN_EMULATED __m256 _mm512_castps512_ps256(__m512 a) {
  __m256 low;
  std::memcpy(&low, &a, sizeof low);
  return low;
}
FREETOKEN_EMULATED __m256i _mm512_castsi512_si256(__m512i a) {
  __m256i low;
  std::memcpy(&low, &a, sizeof low);
  return low;
}
FREETOKEN_EMULATED __m256d _mm512_extractf64x4_pd(__m512d a, int half) {
  return half == 0 ? __m256d{a[0], a[1], a[2], a[3]} : __m256d{a[4], a[5], a[6], a[7]};
}

// --- integers
FREETOKEN_EMULATED __m512i _mm512_setzero_si512() { return __m512i{}; }
FREETOKEN_EMULATED __m512i _mm512_set1_epi8(char x) {
  return as_integers(S8x64{} + static_cast<signed char>(x));
}
FREETOKEN_EMULATED __m512i _mm512_set1_epi16(short x) {
  return as_integers(U16x32{} + static_cast<unsigned short>(x));
}
FREETOKEN_EMULATED __m512i _mm512_set1_epi32(int x) { return as_integers(S32x16{} + x); }
FREETOKEN_EMULATED __m512i _mm512_setr_epi64(long long a, long long b, long long c, long long d,
                                             long long e, long long f, long long g, long long h) {
  return __m512i{a, b, c, d, e, f, g, h};
}
FREETOKEN_EMULATED __m512i _mm512_broadcast_i32x4(__m128i a) {
  return __m512i{a[0], a[1], a[0], a[1], a[0], a[1], a[0], a[1]};
}
FREETOKEN_EMULATED __m512i _mm512_loadu_si512(const void* at) {
  __m512i value;
  std::memcpy(&value, at, sizeof value);
  return value;
}
// Unlike the instruction's users, a test wants to know of a wrong alignment.
FREETOKEN_EMULATED __m512i _mm512_load_si512(const void* at) {
  if (reinterpret_cast<std::uintptr_t>(at) % 64 != 0) __builtin_trap();
  return _mm512_loadu_si512(at);
}
FREETOKEN_EMULATED void _mm512_store_si512(void* at, __m512i value) {
  if (reinterpret_cast<std::uintptr_t>(at) % 64 != 0) __builtin_trap();
  std::memcpy(at, &value, sizeof value);
}
FREETOKEN_EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
FREETOKEN_EMULATED __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
FREETOKEN_EMULATED __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return as_integers(as<U32x16>(a) + as<U32x16>(b));
}
FREETOKEN_EMULATED __m512i _mm512_sub_epi32(__m512i a, __m512i b) {
  return as_integers(as<U32x16>(a) - as<U32x16>(b));
}
FREETOKEN_EMULATED __m512i _mm512_sub_epi8(__m512i a, __m512i b) {
  return as_integers(as<U8x64>(a) - as<U8x64>(b));
}
FREETOKEN_EMULATED __m512i _mm512_max_epu32(__m512i a, __m512i b) {
  const auto x = as<U32x16>(a);
  const auto y = as<U32x16>(b);
  return as_integers(x > y ? x : y);
}
FREETOKEN_EMULATED __m512i _mm512_abs_epi8(__m512i a) {
  // -128 stays as it is: negated without a sign, as the instruction does.
  const auto x = as<U8x64>(a);
  return as_integers(as<S8x64>(a) < 0 ? 0 - x : x);
}
FREETOKEN_EMULATED __m512i _mm512_slli_epi16(__m512i a, unsigned bits) {
  return as_integers(as<U16x32>(a) << static_cast<unsigned short>(bits));
}
FREETOKEN_EMULATED __m512i _mm512_srli_epi16(__m512i a, unsigned bits) {
  return as_integers(as<U16x32>(a) >> static_cast<unsigned short>(bits));
}
FREETOKEN_EMULATED __m512i _mm512_slli_epi32(__m512i a, unsigned bits) {
  return as_integers(as<U32x16>(a) << bits);
}
FREETOKEN_EMULATED __m512i _mm512_srli_epi32(__m512i a, unsigned bits) {
  return as_integers(as<U32x16>(a) >> bits);
}
FREETOKEN_EMULATED __m512i _mm512_srai_epi32(__m512i a, unsigned bits) {
  return as_integers(as<S32x16>(a) >> static_cast<int>(bits));
}
// Bit i of the immediate is the result where the three operands' bits read as the number i.
FREETOKEN_EMULATED __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  __m512i value{};
  for (int i = 0; i < 8; ++i) {
    if ((table >> i & 1) == 0) continue;
    value |= ((i & 4) != 0 ? a : ~a) & ((i & 2) != 0 ? b : ~b) & ((i & 1) != 0 ? c : ~c);
  }
  return value;
}

// --- permutations
FREETOKEN_EMULATED __m512i _mm512_permutexvar_epi64(__m512i index, __m512i table) {
  const auto lanes = as<U64x8>(index);
  __m512i value;
  for (int i = 0; i < 8; ++i) value[i] = table[lanes[i] & 7U];
  return value;
}
FREETOKEN_EMULATED __m512i _mm512_permutexvar_epi16(__m512i index, __m512i table) {
  const auto lanes = as<U16x32>(index);
  const auto from = as<U16x32>(table);
  U16x32 value;
  for (int i = 0; i < 32; ++i) value[i] = from[lanes[i] & 31U];
  return as_integers(value);
}
FREETOKEN_EMULATED __m512i _mm512_permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
  const auto lanes = as<U16x32>(index);
  const auto first = as<U16x32>(a);
  const auto second = as<U16x32>(b);
  U16x32 value;
  for (int i = 0; i < 32; ++i) {
    value[i] = (lanes[i] & 32U) != 0 ? second[lanes[i] & 31U] : first[lanes[i] & 31U];
  }
  return as_integers(value);
}
FREETOKEN_EMULATED __m512i _mm512_permutex2var_epi8(__m512i a, __m512i index, __m512i b) {
  const auto lanes = as<U8x64>(index);
  const auto first = as<U8x64>(a);
  const auto second = as<U8x64>(b);
  U8x64 value;
  for (int i = 0; i < 64; ++i) {
    value[i] = (lanes[i] & 64U) != 0 ? second[lanes[i] & 63U] : first[lanes[i] & 63U];
  }
  return as_integers(value);
}
// Within 128 bits; an index with its top bit set gives 0.
FREETOKEN_EMULATED __m512i _mm512_shuffle_epi8(__m512i table, __m512i index) {
  const auto lanes = as<U8x64>(index);
  const auto from = as<U8x64>(table);
  U8x64 value;
  for (int i = 0; i < 64; ++i) {
    value[i] = (lanes[i] & 128U) != 0 ? 0 : from[(i & 48) + (lanes[i] & 15)];
  }
  return as_integers(value);
}
FREETOKEN_EMULATED __m512i interleaved(__m512i a, __m512i b, int first) {
  const auto even = as<U8x64>(a);
  const auto odd = as<U8x64>(b);
  U8x64 value;
  for (int i = 0; i < 64; ++i) {
    const int from = (i & 48) + first + (i & 15) / 2;
    value[i] = i % 2 == 0 ? even[from] : odd[from];
  }
  return as_integers(value);
}
FREETOKEN_EMULATED __m512i _mm512_unpacklo_epi8(__m512i a, __m512i b) {
  return interleaved(a, b, 0);
}
FREETOKEN_EMULATED __m512i _mm512_unpackhi_epi8(__m512i a, __m512i b) {
  return interleaved(a, b, 8);
}

// --- masks
FREETOKEN_EMULATED __mmask64 _mm512_movepi8_mask(__m512i a) {
  const auto lanes = as<U8x64>(a);
  __mmask64 mask = 0;
  for (int i = 0; i < 64; ++i) mask |= static_cast<__mmask64>(lanes[i] >> 7) << i;
  return mask;
}
FREETOKEN_EMULATED __m512i _mm512_mask_mov_epi8(__m512i otherwise, __mmask64 mask, __m512i a) {
  auto value = as<U8x64>(otherwise);
  const auto from = as<U8x64>(a);
  for (int i = 0; i < 64; ++i) {
    if ((mask >> i & 1U) != 0) value[i] = from[i];
  }
  return as_integers(value);
}

FREETOKEN_EMULATED __mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) {
  const auto lanes = as<U32x16>(a) & as<U32x16>(b);
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(lanes[i] != 0) << i;
  return static_cast<__mmask16>(mask);
}
FREETOKEN_EMULATED __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 a) {
  for (int i = 0; i < 16; ++i) {
    if ((mask >> i & 1) == 0) a[i] = 0;
  }
  return a;
}

// --- conversions
FREETOKEN_EMULATED __m512 _mm512_cvtepi32_ps(__m512i a) {
  return __builtin_convertvector(as<S32x16>(a), __m512);
}
FREETOKEN_EMULATED __m512i _mm512_cvtps_epi32(__m512 a) {
  S32x16 value;
  for (int i = 0; i < 16; ++i) value[i] = _mm_cvtss_si32(_mm_set_ss(a[i]));
  return as_integers(value);
}
FREETOKEN_EMULATED __m512i joined(__m256i low, __m256i high) {
  return __m512i{low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
}
FREETOKEN_EMULATED __m512i _mm512_cvtepu8_epi32(__m128i a) {
  return joined(_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(a, a)));
}
FREETOKEN_EMULATED __m512i _mm512_cvtepi8_epi32(__m128i a) {
  return joined(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(a, a)));
}
FREETOKEN_EMULATED __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return joined(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
                _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1)));
}
FREETOKEN_EMULATED __m512 _mm512_cvtph_ps(__m256i a) {
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(a));
  const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
  return as<__m512>(joined(as<__m256i>(low), as<__m256i>(high)));
}
// The low byte of every lane.
FREETOKEN_EMULATED __m128i _mm512_cvtepi32_epi8(__m512i a) {
  const auto lanes = as<S32x16>(a);
  signed char bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<signed char>(lanes[i]);
  __m128i value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// --- products
inline __attribute__((always_inline)) float flushed(float x) {
  return std::fabs(x) < 0x1p-126F ? 0.0F * x : x;
}
inline __attribute__((always_inline)) float bf16_single(unsigned short bits) {
  const unsigned wide = static_cast<unsigned>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return flushed(value);
}
// The odd element first, then the even one; each a fused step that takes and gives subnormals as
// zero.
FREETOKEN_EMULATED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  const auto x = as<U16x32>(a);
  const auto y = as<U16x32>(b);
  for (int i = 0; i < 16; ++i) {
    for (const int odd : {1, 0}) {
      sum[i] = flushed(__builtin_fmaf(bf16_single(x[2 * i + odd]), bf16_single(y[2 * i + odd]),
                                      flushed(sum[i])));
    }
  }
  return sum;
}
// Four products of an unsigned and a signed byte each, without saturation.
FREETOKEN_EMULATED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  auto value = as<S32x16>(sum);
  const auto x = as<U8x64>(a);
  const auto y = as<S8x64>(b);
  for (int i = 0; i < 64; ++i) value[i / 4] += x[i] * y[i];
  return as_integers(value);
}

FREETOKEN_EMULATED __m256i _mm256_dpbusd_avx_epi32(__m256i sum, __m256i a, __m256i b) {
  return _mm512_castsi512_si256(_mm512_dpbusd_epi32(joined(sum, sum), joined(a, a), joined(b, b)));
}

// --- tiles: one thread's, as the configuration gives them
struct Tiles {
  struct Config {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
  };
  Config config;
  std::uint8_t data[8][16][64];

  // Rows and columns beyond a tile's shape are zero.
  void clear(int tile) { std::memset(data[tile], 0, sizeof data[tile]); }
  // What an instruction on an unconfigured tile or of a wrong shape does.
  static void require(bool condition) {
    if (!condition) __builtin_trap();
  }
};

inline Tiles& tiles() {
  static thread_local Tiles all{};
  return all;
}

FREETOKEN_EMULATED void _tile_loadconfig(const void* config) {
  Tiles& all = tiles();
  std::memcpy(&all.config, config, sizeof all.config);
  Tiles::require(all.config.palette == 1);
  for (int tile = 0; tile < 8; ++tile) {
    Tiles::require(all.config.rows[tile] <= 16 && all.config.row_bytes[tile] <= 64);
    all.clear(tile);
  }
}
FREETOKEN_EMULATED void _tile_release() { tiles() = Tiles{}; }
FREETOKEN_EMULATED void _tile_zero(int tile) {
  Tiles::require(tiles().config.rows[tile] != 0);
  tiles().clear(tile);
}
FREETOKEN_EMULATED void _tile_loadd(int tile, const void* at, std::size_t stride) {
  Tiles& all = tiles();
  Tiles::require(all.config.rows[tile] != 0);
  all.clear(tile);
  for (std::size_t row = 0; row < all.config.rows[tile]; ++row) {
    std::memcpy(all.data[tile][row], static_cast<const char*>(at) + row * stride,
                all.config.row_bytes[tile]);
  }
}
FREETOKEN_EMULATED void _tile_stored(int tile, void* at, std::size_t stride) {
  const Tiles& all = tiles();
  Tiles::require(all.config.rows[tile] != 0);
  for (std::size_t row = 0; row < all.config.rows[tile]; ++row) {
    std::memcpy(static_cast<char*>(at) + row * stride, all.data[tile][row],
                all.config.row_bytes[tile]);
  }
}
template <class T>
T tile_element(int tile, int row, int index) {
  T value;
  std::memcpy(&value, tiles().data[tile][row] + static_cast<std::size_t>(index) * sizeof value,
              sizeof value);
  return value;
}
// Even and odd elements each have a sum; both together are added to the destination.
FREETOKEN_EMULATED void _tile_dpbf16ps(int sum, int a, int b) {
  Tiles& all = tiles();
  const int pairs = all.config.row_bytes[a] / 4;
  const int columns = all.config.row_bytes[sum] / 4;
  Tiles::require(all.config.rows[sum] == all.config.rows[a] && pairs == all.config.rows[b] &&
                 all.config.row_bytes[sum] == all.config.row_bytes[b]);
  for (int row = 0; row < all.config.rows[sum]; ++row) {
    for (int column = 0; column < columns; ++column) {
      float parts[2] = {};
      for (int pair = 0; pair < pairs; ++pair) {
        for (int odd = 0; odd < 2; ++odd) {
          parts[odd] = flushed(__builtin_fmaf(
              bf16_single(tile_element<unsigned short>(a, row, 2 * pair + odd)),
              bf16_single(tile_element<unsigned short>(b, pair, 2 * column + odd)), parts[odd]));
        }
      }
      const float before = flushed(tile_element<float>(sum, row, column));
      const float after = flushed(before + flushed(parts[0] + parts[1]));
      std::memcpy(all.data[sum][row] + 4 * column, &after, sizeof after);
    }
  }
}

// Four products of signed bytes each are added to the destination's 32-bit integers.
FREETOKEN_EMULATED void _tile_dpbssd(int sum, int a, int b) {
  Tiles& all = tiles();
  const int quads = all.config.row_bytes[a] / 4;
  const int columns = all.config.row_bytes[sum] / 4;
  Tiles::require(all.config.rows[sum] == all.config.rows[a] && quads == all.config.rows[b] &&
                 all.config.row_bytes[sum] == all.config.row_bytes[b]);
  for (int row = 0; row < all.config.rows[sum]; ++row) {
    for (int column = 0; column < columns; ++column) {
      auto total = tile_element<std::int32_t>(sum, row, column);
      for (int quad = 0; quad < quads; ++quad) {
        for (int i = 0; i < 4; ++i) {
          total += tile_element<std::int8_t>(a, row, 4 * quad + i) *
                   tile_element<std::int8_t>(b, quad, 4 * column + i);
        }
      }
      std::memcpy(all.data[sum][row] + 4 * column, &total, sizeof total);
    }
  }
}

#undef FREETOKEN_EMULATED

}  // namespace
}  // namespace freetoken::exec
