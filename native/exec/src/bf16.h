// bfloat16 as plain 16-bit words: the upper half of an IEEE single.
#pragma once
#include <bit>
#include <cstdint>

namespace freetoken::exec {

using Bf16 = std::uint16_t;

// Everything here has internal linkage: these headers are compiled once per instruction set, and
// a merged inline function could bring AVX-512 code to a machine without it.
namespace {

[[maybe_unused]] inline float bf16_to_float(Bf16 bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Round to nearest even; a NaN stays a (quiet) NaN.
[[maybe_unused]] inline Bf16 float_to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return static_cast<Bf16>((bits >> 16) | 0x40U);
  }
  return static_cast<Bf16>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

}  // namespace
}  // namespace freetoken::exec
