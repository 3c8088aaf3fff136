#include "routing_tap.h"

#include <algorithm>
#include <iterator>

namespace freetoken::exec {

void RoutingTap::dispatch(Executor& executor, const RoutedTokens& routed) {
  if (on_.load(std::memory_order_relaxed)) keep(routed);
  inner_.dispatch(executor, routed);
}

void RoutingTap::start(std::size_t capacity_ids) {
  clear();
  capacity_ids_ = capacity_ids;
  on_.store(true, std::memory_order_relaxed);
}

void RoutingTap::stop() {
  on_.store(false, std::memory_order_relaxed);
  layers_ = {};
  ids_ = {};
  overflowed_ = false;
}

void RoutingTap::clear() {
  layers_.clear();
  ids_.clear();
  overflowed_ = false;
}

void RoutingTap::keep(const RoutedTokens& routed) {
  const std::size_t count = routed.tokens * routed.top_k;
  // A call without tokens takes a place too, so that their number is bounded.
  overflowed_ = overflowed_ || layers_.size() + ids_.size() + count >= capacity_ids_;
  if (overflowed_) return;
  layers_.push_back({routed.moe_layer_index, routed.tokens, routed.top_k});
  std::transform(routed.ids, routed.ids + count, std::back_inserter(ids_),
                 [](std::int32_t id) { return static_cast<std::uint16_t>(id); });
}

}  // namespace freetoken::exec
