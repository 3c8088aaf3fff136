// Activations in eight bits: per token and 32 columns one scale, the largest magnitude / 127, and
// numbers rounded to the nearest (even) of its multiples.
#pragma once
#include <immintrin.h>

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

// [quad of four columns][token] four bytes, then [32 columns][token] scales, then
// [16 columns][token] sums of the bytes. Columns are padded with zeros to a multiple of 32.
// Ints::round(F) gives sixteen bytes.
template <class Isa, class Ints, QuadOrder Order>
struct VnniPanel {
  static constexpr std::size_t kQuads = kPanelColumns / 4;

  static std::size_t scales_offset(std::size_t columns, std::size_t width) {
    return round_up(columns, kPanelColumns) * width;
  }
  static std::size_t sums_offset(std::size_t columns, std::size_t width) {
    return scales_offset(columns, width) + ceil_div(columns, kPanelColumns) * width * sizeof(float);
  }
  static std::size_t bytes(std::size_t columns, int width) {
    const auto tokens = static_cast<std::size_t>(width);
    return sums_offset(columns, tokens) +
           2 * ceil_div(columns, kPanelColumns) * tokens * sizeof(std::int32_t);
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

  static void store(const Bf16* values, std::size_t index, std::size_t token, std::size_t width,
                    std::size_t columns, std::byte* panel) {
    const auto first = Isa::load_bf16(values);
    const auto second = Isa::load_bf16(values + 16);
    const auto zero = Isa::zero();
    const float largest = Isa::reduce_max(
        Isa::max(Isa::max(first, Isa::sub(zero, first)), Isa::max(second, Isa::sub(zero, second))));
    // A maximum passes over what is not a number; the scale brings it to the result.
    const float none = Isa::reduce_add(Isa::fma(first, zero, Isa::mul(second, zero)));
    // Numbers so small that the quotient is infinite count as zero.
    const float inverse = largest > 1e-35F ? 127.0F / largest : 0.0F;
    const __m128i bytes[2] = {Ints::round(Isa::mul(first, Isa::set1(inverse))),
                              Ints::round(Isa::mul(second, Isa::set1(inverse)))};
    std::int32_t quads[kQuads];
    std::int32_t sums[2];
    for (std::size_t i = 0; i < 2; ++i) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(quads + 4 * i), ordered(bytes[i]));
      sums[i] = sum(bytes[i]);
    }
    auto* out = reinterpret_cast<std::int32_t*>(panel) + index * kQuads * width + token;
    for (std::size_t i = 0; i < kQuads; ++i) out[i * width] = quads[i];
    auto* scales = reinterpret_cast<float*>(panel + scales_offset(columns, width));
    scales[index * width + token] = largest / 127.0F + none;
    auto* all_sums = reinterpret_cast<std::int32_t*>(panel + sums_offset(columns, width));
    all_sums[2 * index * width + token] = sums[0];
    all_sums[(2 * index + 1) * width + token] = sums[1];
  }
};

}  // namespace
}  // namespace freetoken::exec
