// How many reads to keep in flight: grows while throughput grows.
#pragma once

#include <cstdint>

namespace freetoken::host {

// Fed with one throughput sample per interval. Doubles the depth as long as that pays, goes back
// one step when it does not, and tries again after a while because disks and neighbours change.
class DepthControl {
 public:
  DepthControl(std::uint32_t start, std::uint32_t maximum);

  [[nodiscard]] std::uint32_t depth() const { return depth_; }
  // Returns the depth to use from now on.
  std::uint32_t sample(double bytes_per_s);

 private:
  enum class Phase { kFirst, kTrying, kHolding };

  std::uint32_t maximum_;
  std::uint32_t depth_;
  std::uint32_t previous_;
  double base_bytes_per_s_ = 0.0;
  std::uint32_t held_count_ = 0;
  std::uint32_t hold_count_;
  Phase phase_ = Phase::kFirst;
};

}  // namespace freetoken::host
