// Philox4x64-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3" (SC 2011): a keyed bijection of a 256-bit counter.
#pragma once
#include <array>
#include <cstdint>

namespace freetoken::exec {

using PhiloxCounter = std::array<std::uint64_t, 4>;  // least significant word first
using PhiloxKey = std::array<std::uint64_t, 2>;

inline PhiloxCounter philox4x64(PhiloxCounter counter, PhiloxKey key) {
  constexpr std::uint64_t kMultipliers[2] = {0xD2E7470EE14C6C93U, 0xCA5A826395121157U};
  constexpr std::uint64_t kWeyl[2] = {0x9E3779B97F4A7C15U, 0xBB67AE8584CAA73BU};
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    const auto first = static_cast<unsigned __int128>(kMultipliers[0]) * counter[0];
    const auto second = static_cast<unsigned __int128>(kMultipliers[1]) * counter[2];
    counter = {static_cast<std::uint64_t>(second >> 64) ^ counter[1] ^ key[0],
               static_cast<std::uint64_t>(second),
               static_cast<std::uint64_t>(first >> 64) ^ counter[3] ^ key[1],
               static_cast<std::uint64_t>(first)};
    key = {key[0] + kWeyl[0], key[1] + kWeyl[1]};
  }
  return counter;
}

// The first 64 bits of the stream (seed, draw_index): those of numpy's
// Philox(key=seed, counter=draw_index).random_raw(), which counts up before it computes.
inline std::uint64_t philox_draw(std::uint64_t seed, std::uint64_t draw_index) {
  const std::uint64_t next = draw_index + 1;
  return philox4x64({next, next == 0 ? 1U : 0U, 0, 0}, {seed, 0})[0];
}

}  // namespace freetoken::exec
