#include "ranges.hpp"

#include <algorithm>
#include <cstring>

namespace freetoken::host {

void copy_ranges(const std::vector<CopyRange>& ranges) {
  for (const CopyRange& range : ranges) std::memcpy(range.to, range.from, range.length_bytes);
}

std::uint64_t first_difference(const std::byte* left, const std::byte* right,
                               std::uint64_t length_bytes) {
  constexpr std::uint64_t kPieceBytes = 4096;  // memcmp is fast and says only that, not where
  for (std::uint64_t at = 0; at < length_bytes; at += kPieceBytes) {
    const std::uint64_t piece_bytes = std::min(kPieceBytes, length_bytes - at);
    if (std::memcmp(left + at, right + at, piece_bytes) == 0) continue;
    const auto [found, other] = std::mismatch(left + at, left + at + piece_bytes, right + at);
    return static_cast<std::uint64_t>(found - left);
  }
  return length_bytes;
}

}  // namespace freetoken::host
