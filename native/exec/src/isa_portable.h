// Sixteen lanes in plain C++. Results are those of the FMA instruction sets, bit for bit.
#pragma once
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "bf16.h"

namespace freetoken::exec {
namespace {

// A correctly rounded a*b+c in singles. The product of two singles is exact in a double; the sum
// is rounded to odd, so that the second rounding (to single) sees which side of a tie it is on.
inline float fused_multiply_add(float a, float b, float c) {
#ifdef FP_FAST_FMAF
  return std::fma(a, b, c);
#else
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const double addend = c;
  const double sum = product + addend;
  const double back = sum - product;
  const double error = (product - (sum - back)) + (addend - back);
  auto bits = std::bit_cast<std::uint64_t>(sum);
  const bool inexact = error > 0 || error < 0;
  if (inexact && (bits & 1U) == 0) {
    bits += ((error > 0) == (sum > 0)) ? std::uint64_t{1} : ~std::uint64_t{0};
  }
  return static_cast<float>(std::bit_cast<double>(bits));
#endif
}

struct PortableIsa {
  static constexpr const char* kName = "portable";
  static constexpr std::size_t kMaxWidth = 4;
  static constexpr std::size_t row_blocks(std::size_t /*width*/) { return 1; }

  struct F {
    float v[16];
  };

  template <class Op>
  static F each(Op op) {
    F r;
    for (int i = 0; i < 16; ++i) r.v[i] = op(i);
    return r;
  }
  static F zero() {
    return each([](int) { return 0.0F; });
  }
  static F set1(float x) {
    return each([&](int) { return x; });
  }
  static F load(const float* p) {
    return each([&](int i) { return p[i]; });
  }
  static F load_bf16(const Bf16* p) {
    return each([&](int i) { return bf16_to_float(p[i]); });
  }
  static void store(float* p, const F& a) {
    for (int i = 0; i < 16; ++i) p[i] = a.v[i];
  }
  static F add(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  static F sub(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
  }
  static F mul(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F div(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
  }
  // The second operand when either is NaN, as the x86 instructions do.
  static F min(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F max(const F& a, const F& b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F fma(const F& a, const F& b, const F& c) {
    return each([&](int i) { return fused_multiply_add(a.v[i], b.v[i], c.v[i]); });
  }
  // 2^n where the low bits of each lane hold n (a float to which 1.5 * 2^23 was added).
  static F power_of_two(const F& a) {
    return each([&](int i) {
      return std::bit_cast<float>((std::bit_cast<std::uint32_t>(a.v[i]) << 23) + 0x3f800000U);
    });
  }
  static float reduce_add(F a) {
    for (int width = 8; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) a.v[i] = a.v[i] + a.v[i + width];
    }
    return a.v[0];
  }
  static float reduce_max(F a) {
    for (int width = 8; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
    }
    return a.v[0];
  }

  // One pair of columns of 16 rows, in kSteps multiply-accumulate steps.
  using Activation = float;
  using W = F;
  static constexpr int kSteps = 2;
  template <int Step>
  static W decode(const std::byte* pair) {
    const auto* p = reinterpret_cast<const Bf16*>(pair);
    return each([&](int i) { return bf16_to_float(p[2 * i + Step]); });
  }
  static F accumulate(const F& acc, const W& w, const Activation* x) {
    return fma(w, set1(*x), acc);
  }
  static void prefetch(const std::byte* /*address*/) {}

  // One cache line of a stream, mixed into `sum`.
  using Line = std::uint64_t;
  static Line mix(Line sum, const std::byte* line) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(line);
    for (int i = 0; i < 8; ++i) sum ^= words[i];
    return sum;
  }
  static std::uint64_t fold(Line sum) { return sum; }
};

}  // namespace
}  // namespace freetoken::exec
