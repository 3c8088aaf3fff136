// Checks of what callers pass: wrong numbers become std::invalid_argument, not a crash.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace freetoken::exec {

struct LinearCall;
struct ExpertsCall;
struct StoreKvCall;
struct AttentionCall;
struct SampleRowsCall;

[[noreturn]] void refuse(std::string_view message);
inline void require(bool condition, std::string_view message) {
  if (!condition) refuse(message);
}
// 64-byte alignment, which the kernels' loads rely on; null is refused too.
void require_aligned(const void* address, std::string_view name);
// 0 <= value, and value < bound unless bound is 0 (unknown).
void require_index(std::int64_t value, std::size_t bound, std::string_view name);

void validate(const LinearCall& call);
void validate(const ExpertsCall& call);
void validate(const StoreKvCall& call);
void validate(const AttentionCall& call);
void validate(const SampleRowsCall& call);

}  // namespace freetoken::exec
