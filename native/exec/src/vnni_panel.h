// Activations as signed bytes, for products with unsigned bytes.
#pragma once
#include <immintrin.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bf16.h"
#include "layout.h"
#include "panel_by_32.h"

namespace freetoken::exec {
namespace {

// In which order four columns of a weight's 32 bits stand.
enum class QuadOrder { kPlain, kNibbles };

// What a token's 32 columns are multiplied by so that they become integers, and its inverse.
struct ByteScale {
  float inverse;
  float scale;
};

// Eight bits: one byte per activation, of which the largest becomes 127. Numbers so small that the
// quotient is infinite count as zero.
struct OneDigit {
  static constexpr std::size_t kDigits = 1;

  static ByteScale scale_of(float largest) {
    return {.inverse = largest > 1e-35F ? 127.0F / largest : 0.0F, .scale = largest / 127.0F};
  }
};

// 22 bits and a sign: three bytes per activation, d0 + 2^8 d1 + 2^16 d2, times a power of two. A
// bf16 number is exact unless it is less than 2^-14 of the largest of its 32; then it is rounded to
// 2^-22 of that. Sums of products are integers, exact until a group's end: what is lost is less
// than sums in singles lose. Numbers below 2^-105 count as zero.
struct ThreeDigits {
  static constexpr std::size_t kDigits = 3;
  static constexpr std::uint32_t kBits = 21;  // below the largest number's first

  static ByteScale scale_of(float largest) {
    constexpr std::uint32_t kBias = 127;
    const std::uint32_t exponent = std::bit_cast<std::uint32_t>(largest) >> 23;
    if (exponent <= kBits || exponent == 255) return {.inverse = 0.0F, .scale = 0.0F};
    return {.inverse = std::bit_cast<float>((2 * kBias + kBits - exponent) << 23),
            .scale = std::bit_cast<float>((exponent - kBits) << 23)};
  }
};

// Bytes of 32 columns of one token, sixteen columns after the other.
template <std::size_t Digits>
struct ByteParts {
  __m128i bytes[2][Digits];
};

// [quad of four columns][digit][token] four bytes, then [32 columns][token] scales, then
// [16 columns][digit][token] sums of the bytes. Columns are padded with zeros to a multiple of 32.
// Ints::digits gives sixteen bytes of each digit.
template <class Isa, class Ints, QuadOrder Order, class Digits>
struct VnniPanel {
  static constexpr std::size_t kQuads = kPanelColumns / 4;
  static constexpr std::size_t kDigits = Digits::kDigits;

  static std::size_t scales_offset(std::size_t columns, std::size_t width) {
    return round_up(columns, kPanelColumns) * width * kDigits;
  }
  static std::size_t sums_offset(std::size_t columns, std::size_t width) {
    return scales_offset(columns, width) + ceil_div(columns, kPanelColumns) * width * sizeof(float);
  }
  static std::size_t bytes(std::size_t columns, int width) {
    const auto tokens = static_cast<std::size_t>(width);
    return sums_offset(columns, tokens) +
           2 * kDigits * ceil_div(columns, kPanelColumns) * tokens * sizeof(std::int32_t);
  }

  static __m128i ordered(__m128i bytes) {
    if constexpr (Order == QuadOrder::kPlain) return bytes;
    // Columns 0 4 1 5 and 2 6 3 7 of every eight: the low and the high nibbles of four bytes.
    return _mm_shuffle_epi8(bytes,
                            _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
  }

  static std::int32_t sum(__m128i bytes) {
    const __m128i above_zero = _mm_xor_si128(bytes, _mm_set1_epi8(-128));
    const __m128i sums = _mm_sad_epu8(above_zero, _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums))) - 16 * 128;
  }

  // Sixteen columns, half of a part, of one token.
  static void store_half(const __m128i (&bytes)[kDigits], std::size_t half, std::size_t token,
                         std::size_t width, std::size_t columns, std::byte* panel) {
    auto* out = reinterpret_cast<std::int32_t*>(panel) + half * 4 * kDigits * width + token;
    auto* sums = reinterpret_cast<std::int32_t*>(panel + sums_offset(columns, width));
    for (std::size_t digit = 0; digit < kDigits; ++digit) {
      std::int32_t quads[4];
      _mm_storeu_si128(reinterpret_cast<__m128i*>(quads), ordered(bytes[digit]));
      for (std::size_t i = 0; i < 4; ++i) out[(i * kDigits + digit) * width] = quads[i];
      sums[(half * kDigits + digit) * width + token] = sum(bytes[digit]);
    }
  }

  // The digits of 32 columns; returns their scale.
  static float digits_of(const Bf16* values, ByteParts<kDigits>& out) {
    const auto first = Isa::load_bf16(values);
    const auto second = Isa::load_bf16(values + 16);
    const auto zero = Isa::zero();
    const float largest = Isa::reduce_max(
        Isa::max(Isa::max(first, Isa::sub(zero, first)), Isa::max(second, Isa::sub(zero, second))));
    // A maximum passes over what is not a number; the scale brings it to the result.
    const float none = Isa::reduce_add(Isa::fma(first, zero, Isa::mul(second, zero)));
    const ByteScale by = Digits::scale_of(largest);
    const auto inverse = Isa::set1(by.inverse);
    Ints::digits(Isa::mul(first, inverse), out.bytes[0]);
    Ints::digits(Isa::mul(second, inverse), out.bytes[1]);
    return by.scale + none;
  }

  static void store(const Bf16* values, std::size_t index, std::size_t token, std::size_t width,
                    std::size_t columns, std::byte* panel) {
    ByteParts<kDigits> parts;
    const float scale = digits_of(values, parts);
    for (std::size_t half = 0; half < 2; ++half) {
      store_half(parts.bytes[half], 2 * index + half, token, width, columns, panel);
    }
    auto* scales = reinterpret_cast<float*>(panel + scales_offset(columns, width));
    scales[index * width + token] = scale;
  }
};

}  // namespace
}  // namespace freetoken::exec
