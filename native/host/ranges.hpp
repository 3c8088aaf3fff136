// Copies and comparisons of ranges of memory, for callers that hold addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace freetoken::host {

struct CopyRange {
  const std::byte* from;
  std::byte* to;
  std::uint64_t length_bytes;
};

// In order, each range whole. Ranges do not overlap.
void copy_ranges(const std::vector<CopyRange>& ranges);

// Offset of the first byte in which `left` and `right` differ, or `length_bytes`.
std::uint64_t first_difference(const std::byte* left, const std::byte* right,
                               std::uint64_t length_bytes);

}  // namespace freetoken::host
