// AVX-512 with vdpbf16ps: a pair of columns in one step, straight from bf16.
#pragma once
#include "isa_avx512.h"

namespace freetoken::exec {
namespace {

struct Avx512Bf16Isa : Avx512Isa {
  static constexpr const char* kName = "avx512_bf16";

  using Activation = std::uint32_t;  // two bf16, the earlier column in the low half
  using W = __m512i;
  static constexpr int kSteps = 1;
  template <int Step>
  static W decode(const std::byte* pair) {
    return _mm512_load_si512(pair);
  }
  static F accumulate(F acc, W w, const Activation* x) {
    const __m512i value = _mm512_set1_epi32(static_cast<int>(*x));
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(value));
  }
};

}  // namespace
}  // namespace freetoken::exec
