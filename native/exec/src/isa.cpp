#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <array>
#include <cstdint>
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
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

// Every processor with the first has the second, but for one server generation (Cooper Lake).
bool has_avx512_bf16() {
  return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vbmi");
}

struct CpuId {
  std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zeros where the processor has no such leaf.
CpuId cpu_id(std::uint32_t leaf, std::uint32_t subleaf) {
  CpuId id;
  __get_cpuid_count(leaf, subleaf, &id.eax, &id.ebx, &id.ecx, &id.edx);
  return id;
}

bool has_avx_vnni() {
  constexpr std::uint32_t kAvxVnni = 1U << 4;
  return has_avx2() && (cpu_id(7, 1).eax & kAvxVnni) != 0;
}

// State components that the operating system saves (XCR0).
std::uint32_t saved_state() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Linux gives a process the tiles' eight kilobytes of state on request only. Refused where the
// kernel does not know of tiles, or where a thread's signal stack is too small for them.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_amx() {
  constexpr std::uint32_t kAmxBf16 = 1U << 22;
  constexpr std::uint32_t kAmxTile = 1U << 24;
  constexpr std::uint32_t kAmxInt8 = 1U << 25;
  constexpr std::uint32_t kTileState = 3U << 17;
  if (!has_avx512_bf16()) return false;
  const std::uint32_t features = cpu_id(7, 0).edx;
  return (features & kAmxBf16) != 0 && (features & kAmxTile) != 0 && (features & kAmxInt8) != 0 &&
         (saved_state() & kTileState) == kTileState && may_use_tiles();
}

constexpr std::array kCandidates{
    Candidate{"amx", amx_kernels, has_amx},
    Candidate{"avx512_bf16", avx512_bf16_kernels, has_avx512_bf16},
    Candidate{"avx512_vnni", avx512_vnni_kernels, has_avx512_vnni},
    Candidate{"avx512", avx512_kernels, has_avx512},
    Candidate{"avx_vnni", avx_vnni_kernels, has_avx_vnni},
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
