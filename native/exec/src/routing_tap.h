// Listens to the routing of a step on its way to whoever runs the experts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "program.h"

namespace freetoken::exec {

// One layer of the step at hand; its ids lie behind those of the layers before it.
struct TappedLayer {
  std::size_t moe_layer_index, tokens, top_k;
};

// Forwards every call unchanged. While it is on it keeps the ids first, as many as there is room
// for. Started, stopped, cleared and read between steps, by the thread that runs them.
class RoutingTap final : public ExpertDispatch {
 public:
  // `inner` must outlive the tap.
  explicit RoutingTap(ExpertDispatch& inner) : inner_(inner) {}
  void dispatch(Executor& executor, const RoutedTokens& routed) override;

  // From the next call on, up to so many ids until they are cleared. Ids fit 16 bits here.
  void start(std::size_t capacity_ids);
  // Keeps nothing any more and gives the memory back.
  void stop();
  // Forgets what was kept: the next step begins.
  void clear();

  [[nodiscard]] const std::vector<TappedLayer>& layers() const { return layers_; }
  // [layers][tokens][top_k] of what was kept.
  [[nodiscard]] const std::vector<std::uint16_t>& ids() const { return ids_; }
  // Whether something had no room since it was cleared.
  [[nodiscard]] bool overflowed() const { return overflowed_; }

 private:
  void keep(const RoutedTokens& routed);

  ExpertDispatch& inner_;
  std::atomic<bool> on_{false};
  std::size_t capacity_ids_ = 0;
  std::vector<TappedLayer> layers_;
  std::vector<std::uint16_t> ids_;
  bool overflowed_ = false;
};

}  // namespace freetoken::exec
