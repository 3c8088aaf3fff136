// Orders of eviction, in integers: freetokend/policy/eviction.py says what they are and why. The
// Python and the Triton version agree with these lines bit for bit.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>

namespace freetoken::exec {

// Key of a slot that may go before all others.
inline constexpr std::int64_t kColdest = -(std::int64_t{1} << 41);

// half_life_ticks 0: least recently used, no scores; otherwise the decayed number of uses.
struct EvictionOrder {
  std::int64_t half_life_ticks;
  std::int64_t ticks_per_layer;

  [[nodiscard]] std::int64_t score_on_use(std::int64_t score, std::int64_t clock) const {
    return half_life_ticks == 0 ? score : joined(score, clock);
  }

  // uses in [1, tokens], tokens < 2^24
  [[nodiscard]] std::int64_t score_on_prompt(std::int64_t score, std::int64_t clock,
                                             std::int64_t uses, std::int64_t tokens) const {
    if (half_life_ticks == 0) return score;
    const std::int64_t share = log2(uses) - log2(tokens);
    return joined(score, clock + kPromptDoublings * half_life_ticks + share);
  }

  [[nodiscard]] std::int64_t key(std::int64_t score, std::int64_t clock) const {
    return half_life_ticks == 0 ? clock : score;
  }

 private:
  static constexpr std::int64_t kPromptDoublings = 6;

  [[nodiscard]] std::int64_t joined(std::int64_t score, std::int64_t moment) const {
    const std::int64_t near = 4 * half_life_ticks - std::abs(score - moment);
    const std::int64_t later = std::max(score, moment);
    return near <= 0 ? later : later + near * near / (16 * half_life_ticks);
  }

  // half_life_ticks * log2(count), linear between powers of two
  [[nodiscard]] std::int64_t log2(std::int64_t count) const {
    const auto bits = static_cast<std::int64_t>(std::bit_width(static_cast<std::uint64_t>(count)));
    const std::int64_t whole = bits - 1;
    const std::int64_t part = (((count << 8) >> whole) - 256) * half_life_ticks >> 8;
    return whole * half_life_ticks + part;
  }
};

}  // namespace freetoken::exec
