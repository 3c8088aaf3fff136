#include "depth_control.hpp"

#include <algorithm>

namespace freetoken::host {
namespace {

// Less than this is noise: doubling the depth must buy something to be kept.
constexpr double kWorthwhileGain = 1.05;
constexpr std::uint32_t kFirstHoldCount = 16;
constexpr std::uint32_t kLongestHoldCount = 256;

}  // namespace

DepthControl::DepthControl(std::uint32_t start, std::uint32_t maximum)
    : maximum_(std::max(maximum, 1U)),
      depth_(std::clamp(start, 1U, maximum_)),
      previous_(depth_),
      hold_count_(kFirstHoldCount) {}

std::uint32_t DepthControl::sample(double bytes_per_s) {
  if (phase_ == Phase::kHolding && ++held_count_ < hold_count_) {
    // While holding, the base follows the disk, so that a later trial is compared with today.
    base_bytes_per_s_ = 0.75 * base_bytes_per_s_ + 0.25 * bytes_per_s;
    return depth_;
  }
  if (phase_ == Phase::kTrying && bytes_per_s < kWorthwhileGain * base_bytes_per_s_) {
    depth_ = previous_;
    phase_ = Phase::kHolding;
    held_count_ = 0;
    hold_count_ = std::min(2 * hold_count_, kLongestHoldCount);
    return depth_;
  }
  base_bytes_per_s_ = bytes_per_s;
  previous_ = depth_;
  depth_ = std::min(2 * depth_, maximum_);
  held_count_ = 0;
  phase_ = depth_ == previous_ ? Phase::kHolding : Phase::kTrying;
  return depth_;
}

}  // namespace freetoken::host
