// How the codes of each format become singles in AVX2 registers.
//
// A codec decodes one step: 16 rows of eight or sixteen columns. It hands eight singles at a time
// to a sink, sink.take<Pair, Slot>(values): Pair counts pairs of columns within the step, Slot
// (0..3) names the accumulator the values belong to. In an interleaved codec a slot holds an even
// and an odd column of four rows side by side; in the others slots 0 and 2 are even, 1 and 3 odd
// columns of eight rows. So every row has one sum of its even and one of its odd columns, which
// `rows` adds up at the very end and `put` writes in order; `spread` arranges a number per row (0-7
// for slots 0 and 1, 8-15 for 2 and 3) for a slot.
//
// Activations are multiplied by kInput. Then a code is kUnit * value / kInput - kOffset, kUnit and
// kInput being powers of two: totals are in units of values until the end. Groups have a multiple
// of kSumColumns columns (but for the last one of fp8_block, which needs no sums).
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

inline void put_in_order(float* out, __m256 first, __m256 second) {
  _mm256_storeu_ps(out, first);
  _mm256_storeu_ps(out + 8, second);
}

struct Interleaved {
  static constexpr float kInput = 1.0F;

  // The factors of an even and an odd column, alternating.
  template <int /*Slot*/>
  static __m256 factor(const float* pair) {
    return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(pair)));
  }
  template <int Slot>
  static __m256 spread(__m256 rows) {
    return Slot % 2 == 0 ? _mm256_unpacklo_ps(rows, rows) : _mm256_unpackhi_ps(rows, rows);
  }
  static __m256 rows(__m256 first, __m256 second) { return _mm256_hadd_ps(first, second); }
  static void put(float* out, __m256 first, __m256 second) { put_in_order(out, first, second); }
};

struct Separate {
  static constexpr std::size_t kSumColumns = 32;
  static constexpr bool kShifted = false;
  static constexpr float kOffset = 0.0F;

  template <int Slot>
  static __m256 factor(const float* pair) {
    return _mm256_broadcast_ss(pair + Slot % 2);
  }
  template <int /*Slot*/>
  static __m256 spread(__m256 rows) {
    return rows;
  }
  static __m256 rows(__m256 even, __m256 odd) { return _mm256_add_ps(even, odd); }
  static void put(float* out, __m256 first, __m256 second) { put_in_order(out, first, second); }
};

inline __m256i both_lanes(__m128i lane) { return _mm256_broadcastsi128_si256(lane); }

// Codes of at most 7 bits as the upper mantissa byte of singles. Two such numbers stand in each
// 32-bit lane, a low and a high one, and only the low one is freed of the other by a shift. The
// high one keeps what lies below it, which is
//   high + 2^-16 (low + residue)
// exactly: linear, so that factors of the low columns reduced by 2^-16 times those of the high ones
// (SummedPanel) and a term per group make up for it. It saves an instruction for every 16 weights.
struct Halves : Interleaved {
  static constexpr bool kShifted = true;

  // Eight columns of eight rows in the order of the 4-bit formats: bytes 0 4 1 5 and 2 6 3 7.
  template <int Pair, int Slot, class Sink>
  static inline __attribute__((always_inline)) void eight(__m256i first, __m256i second,
                                                          Sink& sink) {
    const __m256i exponent = _mm256_set1_epi8(0x3f);
    // Columns 0 and 4, 1 and 5 of rows 0, 1, 4, 5; then of rows 2, 3, 6, 7.
    const __m256i a = _mm256_unpacklo_epi8(first, exponent);
    const __m256i b = _mm256_unpackhi_epi8(first, exponent);
    const __m256i c = _mm256_unpacklo_epi8(second, exponent);
    const __m256i d = _mm256_unpackhi_epi8(second, exponent);
    sink.template take<Pair, Slot>(low(a));
    sink.template take<Pair, Slot + 1>(low(b));
    sink.template take<Pair + 1, Slot>(low(c));
    sink.template take<Pair + 1, Slot + 1>(low(d));
    sink.template take<Pair + 2, Slot>(high(a));
    sink.template take<Pair + 2, Slot + 1>(high(b));
    sink.template take<Pair + 3, Slot>(high(c));
    sink.template take<Pair + 3, Slot + 1>(high(d));
  }

 private:
  static __m256 low(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  static __m256 high(__m256i pairs) { return _mm256_castsi256_ps(pairs); }
};

// 4-bit codes by a table of bytes with the upper bit set: numbers between 1 and 2.
template <class Table, std::size_t SumColumns = 32>
struct NibbleCodec : Halves {
  static constexpr std::size_t kSumColumns = SumColumns;
  static constexpr float kUnit = 16.0F;
  static constexpr float kOffset = Table::kOffset;
  static constexpr float kResidue = 126.0F;
  static constexpr std::size_t kStepColumns = 8;
  static constexpr std::size_t kStepBytes = 64;

  template <class Sink>
  static inline __attribute__((always_inline)) void step(Code at, Sink& sink) {
    half<0>(at, sink);
    half<2>(at + 32, sink);
  }

 private:
  template <int Slot, class Sink>
  static inline __attribute__((always_inline)) void half(Code at, Sink& sink) {
    const __m256i mask = _mm256_set1_epi8(15);
    const __m256i codes = load_codes(at);
    eight<0, Slot>(
        _mm256_shuffle_epi8(Table::bytes(), _mm256_and_si256(codes, mask)),
        _mm256_shuffle_epi8(Table::bytes(), _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask)),
        sink);
  }
};

// 1 + (12 + 2 w) / 32 for w = 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives.
struct E2m1Table {
  static constexpr float kOffset = 22.0F;
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
  static constexpr float kOffset = 24.0F;
  static __m256i bytes() { return code_bytes(); }
};

// The code itself.
struct UnsignedTable {
  static constexpr float kOffset = 16.0F;
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
  static constexpr float kInput = 1.0F;
  static constexpr float kUnit = 0x1p-24F;
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

// Four low bits in the order of the 4-bit formats, two high bits from a plane of their own: numbers
// between 1/2 and 3/4.
struct Q6KCodec : Halves {
  static constexpr std::size_t kSumColumns = 16;
  static constexpr float kUnit = 256.0F;
  static constexpr float kOffset = 128.0F + 32.0F;
  static constexpr float kResidue = 62.5F;
  static constexpr std::size_t kStepColumns = 16;
  static constexpr std::size_t kStepBytes = 192;

  // Rows 0-7 and 8-15 in turn: four chains of sums at a time instead of two.
  template <class Sink>
  static inline __attribute__((always_inline)) void step(Code at, Sink& sink) {
    const __m256i top = load_codes(at);
    const __m256i bottom = load_codes(at + 32);
    half<0, 0>(at + 64, _mm256_slli_epi16(top, 4), _mm256_slli_epi16(top, 2), sink);
    half<0, 2>(at + 96, _mm256_slli_epi16(bottom, 4), _mm256_slli_epi16(bottom, 2), sink);
    half<4, 0>(at + 128, top, _mm256_srli_epi16(top, 2), sink);
    half<4, 2>(at + 160, bottom, _mm256_srli_epi16(bottom, 2), sink);
  }

 private:
  static __m256i join(__m256i nibbles, __m256i plane) {
    return _mm256_or_si256(_mm256_and_si256(nibbles, _mm256_set1_epi8(15)),
                           _mm256_and_si256(plane, _mm256_set1_epi8(0x30)));
  }

  // Bits 4 and 5 of every byte of the two planes belong to the low and to the high nibbles.
  template <int Pair, int Slot, class Sink>
  static inline __attribute__((always_inline)) void half(Code at, __m256i low_plane,
                                                         __m256i high_plane, Sink& sink) {
    const __m256i nibbles = load_codes(at);
    eight<Pair, Slot>(join(nibbles, low_plane), join(_mm256_srli_epi16(nibbles, 4), high_plane),
                      sink);
  }
};

// e4m3 as singles with an exponent 120 too small, which is exact: what is subnormal stays so.
// Activations come 2^80 times too large, so that products keep all their bits: exact where an
// activation is below 2^47 and its product with a code above 2^-86.
// Slots 0 and 1 are the even and odd columns of the even rows, 2 and 3 those of the odd rows: a
// group has one scale for all of them.
struct Fp8Codec : Separate {
  static constexpr float kInput = 0x1p80F;
  static constexpr float kUnit = 0x1p120F;
  static constexpr std::size_t kStepColumns = 8;
  static constexpr std::size_t kStepBytes = 128;

  static void put(float* out, __m256 even, __m256 odd) {
    const __m256 first = _mm256_unpacklo_ps(even, odd);   // rows 0-3 and 8-11
    const __m256 second = _mm256_unpackhi_ps(even, odd);  // rows 4-7 and 12-15
    put_in_order(out, _mm256_permute2f128_ps(first, second, 0x20),
                 _mm256_permute2f128_ps(first, second, 0x31));
  }

  template <class Sink>
  static inline __attribute__((always_inline)) void step(Code at, Sink& sink) {
    pair<0>(at, sink);
    pair<1>(at + 32, sink);
    pair<2>(at + 64, sink);
    pair<3>(at + 96, sink);
  }

 private:
  // Codes in the upper bytes of 16-bit words: there a shift by four puts exponent and mantissa
  // where a single has them, and copies of the sign beside them.
  static __m256i placed(__m256i on_top) { return _mm256_srai_epi16(on_top, 4); }
  static __m256 low(__m256i words) { return high(_mm256_slli_epi32(words, 16)); }
  static __m256 high(__m256i words) {
    return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(-0x78100000)));
  }

  template <int Pair, class Sink>
  static inline __attribute__((always_inline)) void pair(Code at, Sink& sink) {
    const __m256i codes = load_codes(at);
    const __m256i even = placed(_mm256_slli_epi16(codes, 8));
    const __m256i odd = placed(codes);
    sink.template take<Pair, 0>(low(even));
    sink.template take<Pair, 1>(low(odd));
    sink.template take<Pair, 2>(high(even));
    sink.template take<Pair, 3>(high(odd));
  }
};

// The same where a multiplication of a subnormal number costs an assist of 150 cycles (Intel): as
// half precision with its exponent 8 too small, which the conversion makes normal. The sums are the
// same.
struct Fp8HalvesCodec : Separate {
  static constexpr float kInput = 1.0F;
  static constexpr float kUnit = 256.0F;
  static constexpr std::size_t kStepColumns = 8;
  static constexpr std::size_t kStepBytes = 128;

  static void put(float* out, __m256 first, __m256 second) { put_in_order(out, first, second); }

  template <class Sink>
  static inline __attribute__((always_inline)) void step(Code at, Sink& sink) {
    pair<0>(at, sink);
    pair<1>(at + 32, sink);
    pair<2>(at + 64, sink);
    pair<3>(at + 96, sink);
  }

 private:
  // Codes in the upper bytes of 16-bit words. The sign stays, a copy of it comes below, where the
  // half has its fifth bit of exponent.
  static __m256i halves(__m256i on_top) {
    return _mm256_and_si256(_mm256_srai_epi16(on_top, 1), _mm256_set1_epi16(-0x4080));
  }

  template <int Pair, class Sink>
  static inline __attribute__((always_inline)) void pair(Code at, Sink& sink) {
    const __m256i codes = load_codes(at);
    const __m256i even = halves(_mm256_slli_epi16(codes, 8));
    const __m256i odd = halves(codes);
    sink.template take<Pair, 0>(_mm256_cvtph_ps(_mm256_castsi256_si128(even)));
    sink.template take<Pair, 1>(_mm256_cvtph_ps(_mm256_castsi256_si128(odd)));
    sink.template take<Pair, 2>(_mm256_cvtph_ps(_mm256_extracti128_si256(even, 1)));
    sink.template take<Pair, 3>(_mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1)));
  }
};

// The values of a Separate codec as an interleaved one has them, at a shuffle more for each: worth
// it where they are used for many tokens, whose factors are then half the loads.
template <class Codec>
struct Paired : Interleaved {
  static constexpr bool kShifted = false;
  static constexpr std::size_t kStepColumns = Codec::kStepColumns;
  static constexpr std::size_t kStepBytes = Codec::kStepBytes;

  static void put(float* out, __m256 first, __m256 second) { Codec::put(out, first, second); }

  template <class Sink>
  static inline __attribute__((always_inline)) void step(Code at, Sink& sink) {
    Pairing<Sink> pairing{sink, {}};
    Codec::step(at, pairing);
  }

 private:
  template <class Sink>
  struct Pairing {
    Sink& sink;
    __m256 even;

    template <int Pair, int Slot>
    inline __attribute__((always_inline)) void take(__m256 values) {
      if constexpr (Slot % 2 == 0) {
        even = values;
      } else {
        sink.template take<Pair, Slot - 1>(_mm256_unpacklo_ps(even, values));
        sink.template take<Pair, Slot>(_mm256_unpackhi_ps(even, values));
      }
    }
  };
};

}  // namespace
}  // namespace freetoken::exec
