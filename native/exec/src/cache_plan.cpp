#include "cache_plan.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string>

#include "validate.h"

namespace freetoken::exec {
namespace {

// An empty slot goes before every other.
constexpr std::int64_t kEmptyRank = -(std::int64_t{1} << 43);
constexpr std::int64_t kMaxHalfLifeTicks = std::int64_t{1} << 24;
constexpr std::int64_t kMaxLayerTicks = std::int64_t{1} << 40;
constexpr std::size_t kMaxPromptTokens = (std::size_t{1} << 24) - 1;
constexpr std::size_t kMaxCount = std::numeric_limits<std::int32_t>::max();

[[noreturn]] void contradict(const std::string& message) {
  throw std::runtime_error("the expert cache contradicts itself: " + message);
}

std::size_t index(std::int32_t value) { return static_cast<std::size_t>(value); }

}  // namespace

CachePlanner::CachePlanner(const CacheArrays& arrays, const CacheShape& shape,
                           const EvictionOrder& order)
    : arrays_(arrays), shape_(shape), order_(order) {
  const std::size_t experts = shape.experts_per_layer_count;
  require(shape.layers_count > 0 && experts > 0, "a cache needs layers and experts");
  require(experts <= kMaxCount / shape.layers_count, "experts cannot be numbered in int32");
  require(arrays.slots_capacity <= kMaxCount, "slots cannot be numbered in int32");
  require(order.half_life_ticks >= 0 && order.half_life_ticks < kMaxHalfLifeTicks,
          "half_life_ticks is outside [0, 2^24)");
  require(
      order.ticks_per_layer >= 0 && order.ticks_per_layer < kMaxHalfLifeTicks &&
          order.ticks_per_layer * static_cast<std::int64_t>(shape.layers_count) < kMaxLayerTicks,
      "ticks_per_layer is outside [0, 2^24), or 2^40 over all layers");
  require(arrays.slot_of_expert != nullptr && arrays.demanded_at != nullptr &&
              arrays.score != nullptr && arrays.clock != nullptr && arrays.slots_count != nullptr,
          "an array of the cache has no address");
  require(arrays.slots_capacity == 0 ||
              (arrays.expert_of_slot != nullptr && arrays.slot_key != nullptr),
          "an array of the slots has no address");
  uses_.resize(experts);
  hits_.reserve(experts);
  misses_.reserve(experts);
  filled_.reserve(experts);
  victims_.reserve(experts);
}

void CachePlanner::plan(const PlanCall& call) {
  const std::size_t first = first_of(call.moe_layer_index);
  require(call.buckets_count > 0, "a fill table needs at least one bucket");
  count_uses(call);
  split(call.moe_layer_index);
  collect_coldest(call.moe_layer_index, wanted_fills(call), false);
  choose_fills(call.moe_layer_index, victims_.size());

  const std::int64_t now = ++*arrays_.clock;
  const std::int64_t evictions = evict(call.moe_layer_index, call.fills);
  std::int64_t hit_pairs = 0;
  for (const std::int32_t expert : hits_) {
    hit_pairs += uses_[index(expert)];
    stamp(first + index(expert), now);
  }
  std::size_t left = 0;
  for (const std::int32_t expert : misses_) {
    const bool filled = arrays_.slot_of_expert[first + index(expert)] >= 0;
    if (filled || shape_.cpu_kernel) stamp(first + index(expert), now);
    if (filled) continue;
    if (shape_.cpu_kernel) call.cpu[left] = expert;
    ++left;
  }
  *call.fills_count = static_cast<std::int32_t>(filled_.size());
  *call.cpu_count = shape_.cpu_kernel ? static_cast<std::int32_t>(left) : 0;
  *call.stats = {.hits = static_cast<std::int64_t>(hits_.size()),
                 .misses = static_cast<std::int64_t>(misses_.size()),
                 .fills = static_cast<std::int64_t>(filled_.size()),
                 .cpu = shape_.cpu_kernel ? static_cast<std::int64_t>(left) : 0,
                 .evictions = evictions,
                 .deferred = shape_.cpu_kernel ? 0 : static_cast<std::int64_t>(left),
                 .hit_pairs = hit_pairs,
                 .pairs = pairs_,
                 .refused = 0};
  rewrite(call, index(*call.valid_tokens));
}

void CachePlanner::reserve(const ReserveCall& call) {
  const std::size_t first = first_of(call.moe_layer_index);
  for (std::size_t expert = 0; expert < uses_.size(); ++expert) {
    uses_[expert] = call.wanted == nullptr || call.wanted[expert] != 0 ? 1 : 0;
  }
  split(call.moe_layer_index);
  const bool fillable = call.fillable[call.moe_layer_index] != 0;
  collect_coldest(call.moe_layer_index, fillable ? misses_.size() : 0, true);
  filled_.assign(misses_.begin(), misses_.begin() + static_cast<std::ptrdiff_t>(victims_.size()));

  const std::int64_t evictions = evict(call.moe_layer_index, call.fills);
  for (std::size_t expert = 0; expert < uses_.size(); ++expert) {
    const std::int32_t slot = arrays_.slot_of_expert[first + expert];
    if (uses_[expert] == 0 || slot < 0) continue;
    std::int64_t& key = arrays_.slot_key[slot];
    if (key < kHeldFrom) key += kHeld;
  }
  *call.fills_count = static_cast<std::int32_t>(filled_.size());
  *call.stats = {.hits = static_cast<std::int64_t>(hits_.size()),
                 .misses = static_cast<std::int64_t>(misses_.size()),
                 .fills = static_cast<std::int64_t>(filled_.size()),
                 .cpu = 0,
                 .evictions = evictions,
                 .deferred = static_cast<std::int64_t>(misses_.size() - filled_.size()),
                 .hit_pairs = 0,
                 .pairs = 0,
                 .refused = 0};
}

void CachePlanner::release(const ReleaseCall& call) {
  const std::size_t first = first_of(call.moe_layer_index);
  require(call.tokens_count <= kMaxPromptTokens, "a prompt of 2^24 tokens or more");
  hits_.clear();
  for (std::size_t expert = 0; expert < uses_.size(); ++expert) {
    const std::int32_t uses = call.uses[expert];
    require(uses <= 0 || index(uses) <= call.tokens_count, "an expert has more uses than tokens");
    const std::int32_t slot = slot_of(first + expert);
    if (slot >= 0 && arrays_.slot_key[slot] >= kHeldFrom) {
      hits_.push_back(static_cast<std::int32_t>(expert));
    }
  }
  const std::int64_t now = ++*arrays_.clock;
  for (std::size_t expert = 0; expert < uses_.size(); ++expert) {
    if (call.uses[expert] <= 0) continue;
    std::int64_t& score = arrays_.score[first + expert];
    score = order_.score_on_prompt(score, now, call.uses[expert],
                                   static_cast<std::int64_t>(call.tokens_count));
  }
  for (const std::int32_t expert : hits_) {
    arrays_.slot_key[arrays_.slot_of_expert[first + index(expert)]] -= kHeld;
  }
  std::ranges::sort(hits_, [&](std::int32_t a, std::int32_t b) {
    const std::int32_t a_uses = call.uses[a];
    const std::int32_t b_uses = call.uses[b];
    return a_uses != b_uses ? a_uses > b_uses : a < b;
  });
  for (std::size_t at = 0; at < std::min(call.kept_count, hits_.size()); ++at) {
    const std::size_t expert = index(hits_[at]);
    if (call.uses[expert] <= 0) break;
    arrays_.slot_key[arrays_.slot_of_expert[first + expert]] =
        order_.key(arrays_.score[first + expert], now);
    arrays_.demanded_at[first + expert] = now;
  }
}

std::size_t CachePlanner::first_of(std::size_t layer) const {
  require(layer < shape_.layers_count, "the MoE layer does not exist");
  return layer * shape_.experts_per_layer_count;
}

std::int32_t CachePlanner::slot_of(std::size_t expert_id) const {
  const std::int32_t slot = arrays_.slot_of_expert[expert_id];
  if (slot < -1 || (slot >= 0 && index(slot) >= arrays_.slots_capacity)) {
    contradict("expert " + std::to_string(expert_id) + " is in slot " + std::to_string(slot));
  }
  return slot;
}

void CachePlanner::count_uses(const PlanCall& call) {
  const std::int32_t valid = *call.valid_tokens;
  require(valid >= 0 && index(valid) <= call.tokens_capacity,
          "more valid tokens than the call has room for");
  std::ranges::fill(uses_, 0);
  pairs_ = 0;
  for (std::size_t at = 0; at < index(valid) * call.top_k; ++at) {
    const std::int32_t expert = call.routed[at];
    if (expert < 0) continue;
    if (index(expert) >= uses_.size()) {
      refuse("a token is routed to expert " + std::to_string(expert) + " of " +
             std::to_string(uses_.size()));
    }
    ++uses_[index(expert)];
    ++pairs_;
  }
}

// The used experts that have a slot, and those that have none.
void CachePlanner::split(std::size_t layer) {
  hits_.clear();
  misses_.clear();
  const std::size_t first = layer * shape_.experts_per_layer_count;
  for (std::size_t expert = 0; expert < uses_.size(); ++expert) {
    if (uses_[expert] == 0) continue;
    (slot_of(first + expert) >= 0 ? hits_ : misses_).push_back(static_cast<std::int32_t>(expert));
  }
}

// How many misses are to be filled if there are slots for them.
std::size_t CachePlanner::wanted_fills(const PlanCall& call) const {
  const std::size_t misses = misses_.size();
  if (misses == 0 || call.fillable[call.moe_layer_index] == 0) return 0;
  if (!shape_.cpu_kernel) return misses;
  const auto pairs = static_cast<std::uint64_t>(pairs_);
  const std::size_t distinct = hits_.size() + misses;
  const std::uint64_t tokens_per_expert = (pairs + distinct - 1) / distinct;
  const auto bucket = std::min(call.buckets_count - 1,
                               static_cast<std::size_t>(std::bit_width(tokens_per_expert - 1)));
  const std::int32_t count =
      call.fill_count[bucket * (call.misses_capacity + 1) + std::min(misses, call.misses_capacity)];
  return std::min(index(std::max(count, 1)), misses);
}

// The `count` misses that were demanded last.
void CachePlanner::choose_fills(std::size_t layer, std::size_t count) {
  const std::int64_t* const demanded = arrays_.demanded_at + layer * shape_.experts_per_layer_count;
  filled_.assign(misses_.begin(), misses_.end());
  if (count < filled_.size()) {
    std::ranges::nth_element(filled_, filled_.begin() + static_cast<std::ptrdiff_t>(count),
                             [&](std::int32_t a, std::int32_t b) {
                               return demanded[a] != demanded[b] ? demanded[a] > demanded[b]
                                                                 : a < b;
                             });
    filled_.resize(count);
    std::ranges::sort(filled_);
  }
}

// victims_ = the first `count` slots in victim order, by ascending slot; fewer if there are no
// more. Slots of used experts of the layer, or of all of its experts, are left out. One pass; a
// heap whose top is the last of those found so far.
void CachePlanner::collect_coldest(std::size_t layer, std::size_t count, bool whole_layer) {
  victims_.clear();
  const std::int32_t slots = *arrays_.slots_count;
  if (slots < 0 || index(slots) > arrays_.slots_capacity) {
    contradict(std::to_string(slots) + " slots in room for " +
               std::to_string(arrays_.slots_capacity));
  }
  if (count == 0) return;
  const std::size_t experts = shape_.experts_per_layer_count;
  const std::size_t layers = shape_.layers_count;
  const std::int64_t most_lost = order_.ticks_per_layer * static_cast<std::int64_t>(layers);
  for (std::int32_t slot = 0; slot < slots; ++slot) {
    const std::int32_t expert_id = arrays_.expert_of_slot[slot];
    std::int64_t rank = kEmptyRank;
    if (expert_id != -1) {
      const std::int64_t key = arrays_.slot_key[slot];
      // The second is what most slots of a large cache end at, before any division.
      if (key >= kHeldFrom ||
          (victims_.size() == count && key - most_lost > victims_.front().rank)) {
        continue;
      }
      if (expert_id < 0 || index(expert_id) >= layers * experts) {
        contradict("slot " + std::to_string(slot) + " holds expert " + std::to_string(expert_id));
      }
      const std::size_t slot_layer = index(expert_id) / experts;
      if (slot_layer == layer && (whole_layer || uses_[index(expert_id) % experts] != 0)) continue;
      const std::size_t ahead = (slot_layer + layers - layer - 1) % layers + 1;
      rank = key - order_.ticks_per_layer * static_cast<std::int64_t>(ahead);
    }
    const Victim victim{rank, slot};
    if (victims_.size() < count) {
      victims_.push_back(victim);
      std::ranges::push_heap(victims_);
    } else if (victim < victims_.front()) {
      std::ranges::pop_heap(victims_);
      victims_.back() = victim;
      std::ranges::push_heap(victims_);
    }
  }
  std::ranges::sort(victims_, {}, &Victim::slot);
}

// Gives the victims' slots to the filled experts, and returns how many slots were not empty.
std::int64_t CachePlanner::evict(std::size_t layer, Fill* fills) {
  const std::size_t first = layer * shape_.experts_per_layer_count;
  std::int64_t evictions = 0;
  for (std::size_t at = 0; at < victims_.size(); ++at) {
    const std::int32_t slot = victims_[at].slot;
    const std::size_t expert_id = first + index(filled_[at]);
    const std::int32_t before = arrays_.expert_of_slot[slot];
    if (before >= 0) {
      arrays_.slot_of_expert[before] = -1;
      ++evictions;
    }
    arrays_.slot_of_expert[expert_id] = slot;
    arrays_.expert_of_slot[slot] = static_cast<std::int32_t>(expert_id);
    arrays_.slot_key[slot] = kColdest;
    fills[at] = {.expert_id = static_cast<std::int32_t>(expert_id), .slot = slot};
  }
  return evictions;
}

// A use of an expert, whoever computes it.
void CachePlanner::stamp(std::size_t expert_id, std::int64_t now) {
  std::int64_t& score = arrays_.score[expert_id];
  score = order_.score_on_use(score, now);
  arrays_.demanded_at[expert_id] = now;
  const std::int32_t slot = arrays_.slot_of_expert[expert_id];
  if (slot < 0) return;
  std::int64_t& key = arrays_.slot_key[slot];
  key = order_.key(score, now) + (key >= kHeldFrom ? kHeld : 0);
}

void CachePlanner::rewrite(const PlanCall& call, std::size_t valid) const {
  const std::int32_t* const slots =
      arrays_.slot_of_expert + call.moe_layer_index * shape_.experts_per_layer_count;
  const std::int32_t elsewhere = shape_.cpu_kernel ? kOnCpu : kDeferred;
  for (std::size_t at = 0; at < call.tokens_capacity * call.top_k; ++at) {
    const std::int32_t expert = call.routed[at];
    if (at >= valid * call.top_k || expert < 0) {
      call.physical[at] = kNoExpert;
    } else {
      call.physical[at] = slots[expert] >= 0 ? slots[expert] : elsewhere;
    }
  }
}

}  // namespace freetoken::exec
