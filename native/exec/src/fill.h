// An entry of a fill list.
#pragma once

#include <cstdint>

namespace freetoken::exec {

// One record to copy; the layout of a plan's fill list.
struct Fill {
  std::int32_t expert_id;
  std::int32_t slot;
};
static_assert(sizeof(Fill) == 8);

}  // namespace freetoken::exec
