// What a MoE layer does with the expert cache whose arrays are in host memory.
// freetokend/experts/plan/contract.py states each step; this does the same with its integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "eviction.h"
#include "fill.h"

namespace freetoken::exec {

// Entries of `physical` that are not slots.
inline constexpr std::int32_t kOnCpu = -1;
inline constexpr std::int32_t kNoExpert = -2;
inline constexpr std::int32_t kDeferred = -3;

// Keys of held slots: `kHeld` more than they would have; from kHeldFrom on.
inline constexpr std::int64_t kHeld = std::int64_t{1} << 62;
inline constexpr std::int64_t kHeldFrom = std::int64_t{1} << 61;

struct CacheStats {
  std::int64_t hits, misses, fills, cpu, evictions, deferred, hit_pairs, pairs, refused;
};
static_assert(sizeof(CacheStats) == 9 * 8);

// Which expert lies in which slot; shared with whoever resizes the cache between calls.
struct CacheArrays {
  std::int32_t* slot_of_expert;  // [experts] -1: none
  std::int32_t* expert_of_slot;  // [slots_capacity] -1: empty
  std::int64_t* slot_key;        // [slots_capacity]
  std::int64_t* demanded_at;     // [experts]
  std::int64_t* score;           // [experts]
  std::int64_t* clock;
  const std::int32_t* slots_count;
  std::size_t slots_capacity;
};

struct CacheShape {
  std::size_t layers_count;
  std::size_t experts_per_layer_count;
  bool cpu_kernel;  // the CPU can execute the format
};

struct PlanCall {
  std::size_t moe_layer_index;
  const std::int32_t* routed;  // [tokens_capacity][top_k] negative: none
  std::size_t tokens_capacity, top_k;
  const std::int32_t* valid_tokens;
  const std::int32_t* fillable;    // [layers_count]
  const std::int32_t* fill_count;  // [buckets_count][misses_capacity + 1]
  std::size_t buckets_count, misses_capacity;
  std::int32_t* physical;  // [tokens_capacity][top_k]
  Fill* fills;             // [experts_per_layer_count]
  std::int32_t* fills_count;
  std::int32_t* cpu;  // [experts_per_layer_count]
  std::int32_t* cpu_count;
  CacheStats* stats;
};

struct ReserveCall {
  std::size_t moe_layer_index;
  const std::int32_t* fillable;  // [layers_count]
  const std::int32_t* wanted;    // [experts_per_layer_count], or null for all
  Fill* fills;                   // [experts_per_layer_count]
  std::int32_t* fills_count;
  CacheStats* stats;
};

struct ReleaseCall {
  std::size_t moe_layer_index;
  const std::int32_t* uses;  // [experts_per_layer_count]
  std::size_t tokens_count, kept_count;
};

// Allocates when it is made and never again. One call at a time.
//
// Wrong arguments throw std::invalid_argument and arrays that contradict themselves
// std::runtime_error, both before anything has changed.
class CachePlanner {
 public:
  CachePlanner(const CacheArrays& arrays, const CacheShape& shape, const EvictionOrder& order);

  void plan(const PlanCall& call);
  void reserve(const ReserveCall& call);
  void release(const ReleaseCall& call);

 private:
  struct Victim {
    std::int64_t rank;
    std::int32_t slot;
    auto operator<=>(const Victim&) const = default;
  };

  [[nodiscard]] std::size_t first_of(std::size_t layer) const;
  [[nodiscard]] std::int32_t slot_of(std::size_t expert_id) const;
  void count_uses(const PlanCall& call);
  void split(std::size_t layer);
  [[nodiscard]] std::size_t wanted_fills(const PlanCall& call) const;
  void choose_fills(std::size_t layer, std::size_t count);
  void collect_coldest(std::size_t layer, std::size_t count, bool whole_layer);
  [[nodiscard]] std::int64_t evict(std::size_t layer, Fill* fills);
  void stamp(std::size_t expert_id, std::int64_t now);
  void rewrite(const PlanCall& call, std::size_t valid) const;

  CacheArrays arrays_;
  CacheShape shape_;
  EvictionOrder order_;
  // Of the call at hand; local numbers of experts, ascending, but for victims_: slots.
  std::vector<std::int32_t> uses_;  // [experts_per_layer_count]
  std::vector<std::int32_t> hits_, misses_, filled_;
  std::vector<Victim> victims_;
  std::int64_t pairs_ = 0;
};

}  // namespace freetoken::exec
