#include "isa.h"

#include <array>
#include <stdexcept>

namespace freetoken::exec {
namespace {

struct Candidate {
  std::string_view name;
  const Kernels* (*kernels)();
  bool (*runs_here)();
};

bool always() { return true; }

#if defined(__x86_64__)
// __builtin_cpu_supports asks the processor and whether the operating system saves the registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

constexpr std::array kCandidates{
    Candidate{"avx512_bf16", avx512_bf16_kernels, has_avx512_bf16},
    Candidate{"avx512", avx512_kernels, has_avx512},
    Candidate{"avx2", avx2_kernels, has_avx2},
    Candidate{"portable", portable_kernels, always},
};
#else
constexpr std::array kCandidates{Candidate{"portable", portable_kernels, always}};
#endif

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const auto& candidate : kCandidates) {
    if (candidate.runs_here()) names.emplace_back(candidate.name);
  }
  return names;
}

const Kernels* select_kernels(std::string_view isa) {
  for (const auto& candidate : kCandidates) {
    if (isa == "auto" && candidate.runs_here()) return candidate.kernels();
    if (isa != candidate.name) continue;
    if (candidate.runs_here()) return candidate.kernels();
    throw std::runtime_error(
        "instruction set '" + std::string(isa) +
        "' is not supported by this processor; available here: " + joined(available_isas()));
  }
  throw std::invalid_argument("unknown instruction set '" + std::string(isa) +
                              "'; use auto or one of: " + joined(available_isas()));
}

}  // namespace freetoken::exec
