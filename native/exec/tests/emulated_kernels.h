// Kernels of instruction sets that this machine may lack, over emulated instructions.
#pragma once
#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "isa.h"
#include "kernels.h"

namespace freetoken::exec {

const Kernels* emulated_avx_vnni_kernels();
const Kernels* emulated_avx512_kernels();
const Kernels* emulated_avx512_vnni_kernels();
const Kernels* emulated_avx512_bf16_kernels();
const Kernels* emulated_amx_kernels();

namespace test {

struct EmulatedIsa {
  std::string_view name;
  const Kernels* (*kernels)();
};

inline constexpr std::string_view kSlowSubnormals = "avx2_slow_subnormals";
inline constexpr std::string_view kFastSubnormals = "avx2_fast_subnormals";

#if defined(FREETOKEN_TEST_EMULATED)
inline constexpr std::array kEmulatedIsas{
    EmulatedIsa{"emulated_avx_vnni", emulated_avx_vnni_kernels},
    EmulatedIsa{"emulated_avx512", emulated_avx512_kernels},
    EmulatedIsa{"emulated_avx512_vnni", emulated_avx512_vnni_kernels},
    EmulatedIsa{"emulated_avx512_bf16", emulated_avx512_bf16_kernels},
    EmulatedIsa{"emulated_amx", emulated_amx_kernels},
};
#else
inline constexpr std::array<EmulatedIsa, 0> kEmulatedIsas{};
#endif

// The instruction sets of this machine and, where it has the AVX2 they are compiled with, the
// emulated ones and those of other makers.
inline std::vector<std::string> tested_isas() {
  auto names = available_isas();
  if (std::find(names.begin(), names.end(), "avx2") == names.end()) return names;
  for (const EmulatedIsa& isa : kEmulatedIsas) names.emplace_back(isa.name);
#if defined(FREETOKEN_TEST_EMULATED)
  names.emplace_back(kSlowSubnormals);
  names.emplace_back(kFastSubnormals);
#endif
  return names;
}

inline const Kernels* kernels_named(std::string_view name) {
#if defined(FREETOKEN_TEST_EMULATED)
  if (name == kSlowSubnormals || name == kFastSubnormals) {
    return avx2_kernels_for(name == kSlowSubnormals);
  }
#endif
  for (const EmulatedIsa& isa : kEmulatedIsas) {
    if (isa.name == name) return isa.kernels();
  }
  return select_kernels(name);
}

}  // namespace test
}  // namespace freetoken::exec
