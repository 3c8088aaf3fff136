#include "cache_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <vector>

#include "support.h"

namespace freetoken::exec {
namespace {

// A cache, its planner and one call's buffers, all of them right before a page that may not be
// touched.
struct Cache {
  Cache(CacheShape shape, std::size_t slots, EvictionOrder order, std::size_t tokens,
        std::size_t top_k)
      : experts(shape.experts_per_layer_count),
        slot_of_expert(shape.layers_count * experts),
        expert_of_slot(slots),
        slot_key(slots),
        demanded_at(shape.layers_count * experts),
        score(shape.layers_count * experts),
        clock(1),
        slots_count(1),
        routed(tokens * top_k),
        physical(tokens * top_k),
        valid_tokens(1),
        fillable(shape.layers_count),
        fill_count(2),
        cpu(experts),
        fills(experts),
        stats(1),
        fills_count(1),
        cpu_count(1),
        tokens_capacity(tokens),
        top_k_count(top_k) {
    for (std::size_t at = 0; at < slot_of_expert.size(); ++at) {
      slot_of_expert[at] = -1;
      demanded_at[at] = -1;
      score[at] = -(std::int64_t{1} << 40);
    }
    for (std::size_t at = 0; at < slots; ++at) expert_of_slot[at] = -1;
    for (std::size_t at = 0; at < shape.layers_count; ++at) fillable[at] = 1;
    slots_count[0] = static_cast<std::int32_t>(slots);
    fill_count[0] = 0;
    fill_count[1] = 1 << 20;
    planner = std::make_unique<CachePlanner>(
        CacheArrays{slot_of_expert.data(), expert_of_slot.data(), slot_key.data(),
                    demanded_at.data(), score.data(), clock.data(), slots_count.data(), slots},
        shape, order);
  }

  void plan(std::size_t layer, const std::vector<std::int32_t>& ids, std::int32_t valid) {
    std::ranges::copy(ids, routed.data());
    valid_tokens[0] = valid;
    planner->plan({.moe_layer_index = layer,
                   .routed = routed.data(),
                   .tokens_capacity = tokens_capacity,
                   .top_k = top_k_count,
                   .valid_tokens = valid_tokens.data(),
                   .fillable = fillable.data(),
                   .fill_count = fill_count.data(),
                   .buckets_count = 1,
                   .misses_capacity = 1,
                   .physical = physical.data(),
                   .fills = fills.data(),
                   .fills_count = fills_count.data(),
                   .cpu = cpu.data(),
                   .cpu_count = cpu_count.data(),
                   .stats = stats.data()});
  }
  void reserve(std::size_t layer) {
    planner->reserve({.moe_layer_index = layer,
                      .fillable = fillable.data(),
                      .wanted = nullptr,
                      .fills = fills.data(),
                      .fills_count = fills_count.data(),
                      .stats = stats.data()});
  }
  [[nodiscard]] std::vector<std::int32_t> routed_to() {
    return {physical.data(), physical.data() + physical.size()};
  }

  std::size_t experts;
  test::Guarded<std::int32_t> slot_of_expert, expert_of_slot;
  test::Guarded<std::int64_t> slot_key, demanded_at, score, clock;
  test::Guarded<std::int32_t> slots_count, routed, physical, valid_tokens, fillable, fill_count,
      cpu;
  test::Guarded<Fill> fills;
  test::Guarded<CacheStats> stats;
  test::Guarded<std::int32_t> fills_count, cpu_count;
  std::size_t tokens_capacity, top_k_count;
  std::unique_ptr<CachePlanner> planner;
};

constexpr EvictionOrder kLru{.half_life_ticks = 0, .ticks_per_layer = 0};
using Ids = std::vector<std::int32_t>;

TEST(CachePlan, FillsHitsAndEvictsTheLeastRecentlyUsed) {
  Cache cache({.layers_count = 2, .experts_per_layer_count = 4, .cpu_kernel = true}, 3, kLru, 2, 2);
  cache.plan(0, {3, 1, 1, -1}, 2);
  EXPECT_EQ(cache.routed_to(), (Ids{1, 0, 0, kNoExpert}));
  cache.plan(1, {2, -1, 0, 0}, 1);  // the second row is padding
  EXPECT_EQ(cache.routed_to(), (Ids{2, kNoExpert, kNoExpert, kNoExpert}));
  cache.plan(0, {1, -1, -1, -1}, 2);
  EXPECT_EQ(cache.stats[0].hits, 1);
  cache.plan(1, {0, -1, -1, -1}, 1);  // 3 of layer 0 goes: least recently used
  EXPECT_EQ(cache.routed_to()[0], 1);
  EXPECT_EQ(cache.slot_of_expert[3], -1);
  EXPECT_EQ(cache.fills[0].expert_id, 4);
  EXPECT_EQ(cache.stats[0].evictions, 1);
  EXPECT_EQ(cache.clock[0], 4);
}

TEST(CachePlan, WhatIsInUseStaysAndTheRestGoesToTheCpu) {
  Cache cache({.layers_count = 1, .experts_per_layer_count = 8, .cpu_kernel = true}, 2, kLru, 1, 4);
  cache.plan(0, {0, 1, -1, -1}, 1);
  cache.plan(0, {5, 0, 7, 2}, 1);
  EXPECT_EQ(cache.routed_to(), (Ids{kOnCpu, 0, kOnCpu, 1}));
  ASSERT_EQ(cache.cpu_count[0], 2);
  EXPECT_EQ(cache.cpu[0], 5);
  EXPECT_EQ(cache.cpu[1], 7);
  cache.fillable[0] = 0;
  cache.plan(0, {3, 0, 2, -1}, 1);
  EXPECT_EQ(cache.routed_to(), (Ids{kOnCpu, 0, 1, kNoExpert}));
}

TEST(CachePlan, RoundsWithoutACpuKernel) {
  Cache cache({.layers_count = 1, .experts_per_layer_count = 8, .cpu_kernel = false}, 2, kLru, 1,
              4);
  cache.plan(0, {6, 4, 2, 0}, 1);
  EXPECT_EQ(cache.routed_to(), (Ids{kDeferred, kDeferred, 1, 0}));
  cache.plan(0, {6, 4, -1, -1}, 1);
  EXPECT_EQ(cache.routed_to(), (Ids{1, 0, kNoExpert, kNoExpert}));
  EXPECT_EQ(cache.stats[0].evictions, 2);
}

TEST(CachePlan, ReservedSlotsAreHeldUntilTheirRelease) {
  Cache cache({.layers_count = 3, .experts_per_layer_count = 2, .cpu_kernel = true}, 3, kLru, 1, 1);
  cache.plan(2, {0}, 1);
  cache.reserve(0);
  EXPECT_EQ(cache.stats[0].fills, 2);
  cache.plan(1, {0}, 1);  // only the slot of layer 2 may go
  EXPECT_EQ(cache.routed_to(), Ids{0});
  cache.reserve(1);
  EXPECT_EQ(cache.stats[0].hits, 1);
  EXPECT_EQ(cache.stats[0].deferred, 1);
  cache.plan(2, {0}, 1);
  EXPECT_EQ(cache.routed_to(), Ids{kOnCpu});
  test::Guarded<std::int32_t> uses(2);
  uses[0] = 0;
  uses[1] = 5;
  cache.planner->release(
      {.moe_layer_index = 0, .uses = uses.data(), .tokens_count = 5, .kept_count = 2});
  EXPECT_EQ(cache.slot_key[1], kColdest);
  EXPECT_EQ(cache.slot_key[2], cache.clock[0]);
}

TEST(CachePlan, RefusesWhatDoesNotExistAndChangesNothing) {
  Cache cache({.layers_count = 1, .experts_per_layer_count = 4, .cpu_kernel = true}, 2, kLru, 1, 2);
  EXPECT_THROW(cache.plan(1, {0, 0}, 1), std::invalid_argument);
  EXPECT_THROW(cache.plan(0, {0, 4}, 1), std::invalid_argument);
  EXPECT_THROW(cache.plan(0, {0, 0}, 2), std::invalid_argument);
  EXPECT_THROW(cache.plan(0, {0, 0}, -1), std::invalid_argument);
  cache.slots_count[0] = 3;
  EXPECT_THROW(cache.plan(0, {0, 1}, 1), std::runtime_error);
  cache.slots_count[0] = 2;
  cache.expert_of_slot[1] = 4;
  EXPECT_THROW(cache.plan(0, {0, 1}, 1), std::runtime_error);
  cache.expert_of_slot[1] = -1;
  cache.slot_of_expert[1] = 2;
  EXPECT_THROW(cache.plan(0, {0, 1}, 1), std::runtime_error);
  cache.slot_of_expert[1] = -1;
  EXPECT_EQ(cache.clock[0], 0);
  cache.plan(0, {0, 4}, 0);  // padding may hold anything
  EXPECT_EQ(cache.routed_to(), (Ids{kNoExpert, kNoExpert}));
}

TEST(CachePlan, ManyVictimsOfManySlots) {
  constexpr std::size_t kSlots = 16384;
  constexpr std::size_t kExperts = 512;
  Cache cache({.layers_count = 64, .experts_per_layer_count = kExperts, .cpu_kernel = true}, kSlots,
              kLru, kExperts, 1);
  Ids all(kExperts);
  for (std::size_t at = 0; at < kExperts; ++at) all[at] = static_cast<std::int32_t>(at);
  for (std::size_t layer = 0; layer < 64; ++layer) cache.plan(layer, all, kExperts);
  // Half of the layers fit; those that are there are the last ones, in the first slots again.
  for (std::size_t slot = 0; slot < kSlots; ++slot) {
    ASSERT_EQ(cache.expert_of_slot[slot], static_cast<std::int32_t>(slot + kSlots));
  }
  EXPECT_EQ(cache.stats[0].evictions, 512);
}

}  // namespace
}  // namespace freetoken::exec
