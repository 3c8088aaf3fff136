// How the codes of each format become singles in AVX2 registers.
//
// A codec decodes one step: 16 rows of eight or sixteen columns. It hands eight singles at a time
// to a sink, sink.take<Pair, Slot>(values): Pair counts pairs of columns within the step, Slot
// (0..3) names the accumulator the values belong to. Slots 0 and 1 together hold rows 0-7, 2 and 3
// rows 8-15. In an interleaved codec a slot holds an even and an odd column of four rows side by
// side; in the others slots 0 and 2 are even, 1 and 3 odd columns of eight rows. So every row has
// one sum of its even and one of its odd columns, which `rows` adds up at the very end; `spread`
// arranges a number per row (0-7) for slot 0 or 1, and `once` a number for the even columns only.
// Values are kUnit (a power of two) times the codes.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace freetoken::exec {
namespace {

using Code = const std::uint8_t*;

inline __m256i load_codes(Code at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

struct Interleaved {
  // The factors of an even and an odd column, alternating.
  template <int /*Slot*/>
  static __m256 factor(const float* pair) {
    return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(pair)));
  }
  template <int Slot>
  static __m256 once(__m256 all) {
    return _mm256_blend_ps(_mm256_setzero_ps(), all, 0x55);
  }
};

struct Separate {
  static constexpr bool kShifted = false;
  static constexpr int kOffset = 0;
  template <int Slot>
  static __m256 factor(const float* pair) {
    return _mm256_broadcast_ss(pair + Slot % 2);
  }
  template <int /*Slot*/>
  static __m256 spread(__m256 rows) {
    return rows;
  }
  template <int Slot>
  static __m256 once(__m256 all) {
    return Slot % 2 == 0 ? all : _mm256_setzero_ps();
  }
  static __m256 rows(__m256 even, __m256 odd) { return _mm256_add_ps(even, odd); }
};

inline __m256i both_lanes(__m128i lane) { return _mm256_broadcastsi128_si256(lane); }

// 4-bit codes, by a table that holds the upper mantissa byte of a single between 1 and 2. Two such
// numbers stand in each 32-bit lane, a low and a high one, and only the low one is freed of the
// other by a shift. The high one keeps what lies below it, which is
//   high + 2^-16 low + 126 * 2^-16
// exactly: linear, so that factors of the low columns reduced by 2^-16 times those of the high ones
// (NibblePanel) and a term per group make up for it. It saves an instruction for every 16 weights.
// A weight is 16 * value - kOffset.
template <class Table>
struct NibbleCodec : Interleaved {
  static constexpr float kUnit = 1.0F;
  static constexpr std::size_t kStepColumns = 8;
  static constexpr std::size_t kStepBytes = 64;
  static constexpr bool kShifted = true;
  static constexpr int kOffset = Table::kOffset;

  template <int Slot>
  static __m256 spread(__m256 rows) {
    return Slot % 2 == 0 ? _mm256_unpacklo_ps(rows, rows) : _mm256_unpackhi_ps(rows, rows);
  }
  static __m256 rows(__m256 first, __m256 second) { return _mm256_hadd_ps(first, second); }

  template <class Sink>
  static inline __attribute__((always_inline)) void step(Code at, Sink& sink) {
    half<0>(at, sink);
    half<2>(at + 32, sink);
  }

 private:
  static __m256 low(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  static __m256 high(__m256i pairs) { return _mm256_castsi256_ps(pairs); }

  template <int Slot, class Sink>
  static inline __attribute__((always_inline)) void half(Code at, Sink& sink) {
    const __m256i mask = _mm256_set1_epi8(15);
    const __m256i exponent = _mm256_set1_epi8(0x3f);
    const __m256i codes = load_codes(at);
    const __m256i first = _mm256_shuffle_epi8(Table::bytes(), _mm256_and_si256(codes, mask));
    const __m256i second =
        _mm256_shuffle_epi8(Table::bytes(), _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask));
    // Columns 0 and 4, 1 and 5 of rows 0, 1, 4, 5; then of rows 2, 3, 6, 7.
    const __m256i a = _mm256_unpacklo_epi8(first, exponent);
    const __m256i b = _mm256_unpackhi_epi8(first, exponent);
    const __m256i c = _mm256_unpacklo_epi8(second, exponent);
    const __m256i d = _mm256_unpackhi_epi8(second, exponent);
    sink.template take<0, Slot>(low(a));
    sink.template take<0, Slot + 1>(low(b));
    sink.template take<1, Slot>(low(c));
    sink.template take<1, Slot + 1>(low(d));
    sink.template take<2, Slot>(high(a));
    sink.template take<2, Slot + 1>(high(b));
    sink.template take<3, Slot>(high(c));
    sink.template take<3, Slot + 1>(high(d));
  }
};

// 1 + (12 + 2 w) / 32 for w = 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives.
struct E2m1Table {
  static constexpr int kOffset = 22;
  static __m256i bytes() {
    const auto entry = [](int twice) { return static_cast<char>(0x80 | ((12 + twice) << 2)); };
    return both_lanes(_mm_setr_epi8(entry(0), entry(1), entry(2), entry(3), entry(4), entry(6),
                                    entry(8), entry(12), entry(0), entry(-1), entry(-2), entry(-3),
                                    entry(-4), entry(-6), entry(-8), entry(-12)));
  }
};

// 1 + code / 16
inline __m256i code_bytes() {
  const auto entry = [](int code) { return static_cast<char>(0x80 | (code << 3)); };
  return both_lanes(_mm_setr_epi8(entry(0), entry(1), entry(2), entry(3), entry(4), entry(5),
                                  entry(6), entry(7), entry(8), entry(9), entry(10), entry(11),
                                  entry(12), entry(13), entry(14), entry(15)));
}

// code - 8
struct SignedTable {
  static constexpr int kOffset = 24;
  static __m256i bytes() { return code_bytes(); }
};

// The code itself.
struct UnsignedTable {
  static constexpr int kOffset = 16;
  static __m256i bytes() { return code_bytes(); }
};

// 2^24 times byte `Byte` of every 32-bit lane, a signed number: left where a shift by at most three
// bytes puts it, which spares the shift back.
template <int Byte>
inline __m256 signed_byte(__m256i lanes) {
  const __m256i top = Byte == 3 ? lanes : _mm256_slli_epi32(lanes, 24 - 8 * Byte);
  const __m256i alone = Byte == 0 ? top : _mm256_and_si256(top, _mm256_set1_epi32(-0x1000000));
  return _mm256_cvtepi32_ps(alone);
}

struct Int8Codec : Separate {
  static constexpr float kUnit = 0x1p24F;
  static constexpr std::size_t kStepColumns = 8;
  static constexpr std::size_t kStepBytes = 128;

  template <class Sink>
  static inline __attribute__((always_inline)) void step(Code at, Sink& sink) {
    four<0, 0>(at, sink);
    four<0, 2>(at + 32, sink);
    four<2, 0>(at + 64, sink);
    four<2, 2>(at + 96, sink);
  }

 private:
  template <int Pair, int Slot, class Sink>
  static inline __attribute__((always_inline)) void four(Code at, Sink& sink) {
    const __m256i codes = load_codes(at);
    sink.template take<Pair, Slot>(signed_byte<0>(codes));
    sink.template take<Pair, Slot + 1>(signed_byte<1>(codes));
    sink.template take<Pair + 1, Slot>(signed_byte<2>(codes));
    sink.template take<Pair + 1, Slot + 1>(signed_byte<3>(codes));
  }
};

// Four low bits in the order of the 4-bit formats, two high bits from a plane of their own.
struct Q6KCodec : Separate {
  static constexpr float kUnit = 0x1p24F;
  static constexpr std::size_t kStepColumns = 16;
  static constexpr std::size_t kStepBytes = 192;

  template <class Sink>
  static inline __attribute__((always_inline)) void step(Code at, Sink& sink) {
    half<0>(at, sink);
    half<2>(at + 32, sink);
  }

 private:
  template <int Slot, class Sink>
  static inline __attribute__((always_inline)) void half(Code at, Sink& sink) {
    const __m256i plane = load_codes(at);
    eight<0, Slot>(load_codes(at + 64), _mm256_slli_epi16(plane, 4), _mm256_slli_epi16(plane, 2),
                   sink);
    eight<4, Slot>(load_codes(at + 128), plane, _mm256_srli_epi16(plane, 2), sink);
  }

  // Bits 4 and 5 of every byte of the two planes belong to the low and to the high nibbles.
  template <int Pair, int Slot, class Sink>
  static inline __attribute__((always_inline)) void eight(__m256i nibbles, __m256i low_plane,
                                                          __m256i high_plane, Sink& sink) {
    const __m256i mask = _mm256_set1_epi8(15);
    const __m256i bits = _mm256_set1_epi8(0x30);
    const __m256i offset = _mm256_set1_epi8(32);
    const __m256i first = _mm256_sub_epi8(
        _mm256_or_si256(_mm256_and_si256(nibbles, mask), _mm256_and_si256(low_plane, bits)),
        offset);
    const __m256i second =
        _mm256_sub_epi8(_mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(nibbles, 4), mask),
                                        _mm256_and_si256(high_plane, bits)),
                        offset);
    sink.template take<Pair, Slot>(signed_byte<0>(first));
    sink.template take<Pair, Slot + 1>(signed_byte<2>(first));
    sink.template take<Pair + 1, Slot>(signed_byte<0>(second));
    sink.template take<Pair + 1, Slot + 1>(signed_byte<2>(second));
    sink.template take<Pair + 2, Slot>(signed_byte<1>(first));
    sink.template take<Pair + 2, Slot + 1>(signed_byte<3>(first));
    sink.template take<Pair + 3, Slot>(signed_byte<1>(second));
    sink.template take<Pair + 3, Slot + 1>(signed_byte<3>(second));
  }
};

// e4m3 as half precision with its exponent 8 too small: exact, subnormals too. The factor 2^8 is
// in the scale.
struct Fp8Codec : Interleaved {
  static constexpr float kUnit = 1.0F;
  static constexpr bool kShifted = false;
  static constexpr int kOffset = 0;
  static constexpr std::size_t kStepColumns = 8;
  static constexpr std::size_t kStepBytes = 128;

  template <int Slot>
  static __m256 spread(__m256 rows) {
    return _mm256_permutevar8x32_ps(rows, Slot % 2 == 0
                                              ? _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)
                                              : _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7));
  }
  // first: rows 0-3, second: rows 4-7 (both in order, an even and an odd column each)
  static __m256 rows(__m256 first, __m256 second) {
    const __m256 sums = _mm256_hadd_ps(first, second);  // rows 0 1 4 5 2 3 6 7
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums), 0xd8));
  }

  template <class Sink>
  static inline __attribute__((always_inline)) void step(Code at, Sink& sink) {
    pair<0>(at, sink);
    pair<1>(at + 32, sink);
    pair<2>(at + 64, sink);
    pair<3>(at + 96, sink);
  }

 private:
  static __m256i halves(__m256i bytes_on_top) {
    return _mm256_and_si256(_mm256_srai_epi16(bytes_on_top, 1), _mm256_set1_epi16(-0x4001));
  }

  template <int Pair, class Sink>
  static inline __attribute__((always_inline)) void pair(Code at, Sink& sink) {
    const __m256i codes = load_codes(at);
    const __m256i zero = _mm256_setzero_si256();
    const __m256i a = halves(_mm256_unpacklo_epi8(zero, codes));  // rows 0-3, 8-11
    const __m256i b = halves(_mm256_unpackhi_epi8(zero, codes));  // rows 4-7, 12-15
    sink.template take<Pair, 0>(_mm256_cvtph_ps(_mm256_castsi256_si128(a)));
    sink.template take<Pair, 1>(_mm256_cvtph_ps(_mm256_castsi256_si128(b)));
    sink.template take<Pair, 2>(_mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
    sink.template take<Pair, 3>(_mm256_cvtph_ps(_mm256_extracti128_si256(b, 1)));
  }
};

}  // namespace
}  // namespace freetoken::exec
