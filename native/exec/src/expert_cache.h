// Routed experts of a step whose records lie in slots or in the pool: plans, fills and executes.
//
// What computes with a slot here is the CPU too. Records are the same bytes in both places and an
// output depends on bytes, row and token only, so it is the same wherever an expert lies.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache_plan.h"
#include "fill_link.h"
#include "program.h"
#include "scratch.h"

namespace freetoken::exec {

struct ExpertCacheSpec {
  ExpertBank pool;  // records in host memory
  std::byte* slots;
  CacheArrays arrays;
  EvictionOrder order;
  bool cpu_kernel;                     // the CPU takes misses; otherwise they are filled, in rounds
  const std::int32_t* fillable;        // [layers_count]
  const std::int32_t* table_of_layer;  // [layers_count] which of the tables it goes by
  const std::int32_t* fill_count;      // [tables][buckets_count][misses_capacity + 1]
  std::size_t buckets_count, misses_capacity;
};

// Distinct experts of decode steps, by MoE layer; see core/cache_stats.py.
struct LayerCounts {
  std::uint64_t hits, misses, fills, cpu, evictions;
};

// What a decode call that had misses took; see policy/split_calls.py. Experts are distinct ones;
// cpu: those executed while fills were on their way, hits among them.
struct CallTimes {
  std::int32_t layer, bucket, misses, fills, cpu;
  double fill_s, cpu_s, layer_s;
};

// One step at a time, but the counts, which any thread may ask for.
class ExpertCache {
 public:
  // `link` must outlive the cache, as must everything the spec points at.
  ExpertCache(const ExpertCacheSpec& spec, FillLink& link);

  // The decode path: of the experts that have no slot some are filled, the CPU takes the others.
  void decode(Executor& executor, const RoutedTokens& routed);
  // A layer of a prefill: all its experts are streamed into slots, and the next layer's while this
  // one is computed. What finds no slot is executed in the pool.
  void sweep(Executor& executor, const RoutedTokens& routed);
  // Starts streaming a layer that a sweep will come to: all its experts, or those where `wanted`
  // ([experts_per_layer_count]) is not 0, for models whose routing is known ahead.
  void prefetch(std::size_t moe_layer_index, const std::int32_t* wanted);
  // How many experts of a layer a sweep leaves with the key of a use: the most routed ones.
  void set_kept_count(std::size_t kept_count) { kept_count_ = kept_count; }
  // How many layers a sweep streams ahead of the one it computes. 0 shows what that is worth.
  void set_ahead_count(std::size_t ahead_count) { ahead_count_ = ahead_count; }
  // Ends what is being streamed and lets go of its slots; a sweep that goes on takes new ones.
  void let_go();

  // Of the calls since this was asked last, in the order of time; calls that took several rounds
  // are not among them, and of more than can be kept the later ones are not. Between steps.
  [[nodiscard]] std::vector<CallTimes> take_call_times();

  [[nodiscard]] LayerCounts layer_counts(std::size_t moe_layer_index) const;
  // (token, expert) pairs so far.
  [[nodiscard]] std::uint64_t executions_count() const { return executions_count_.load(); }
  // Experts that sweeps have filled.
  [[nodiscard]] std::uint64_t streamed_count() const { return streamed_count_.load(); }
  // Changes of the number of resident experts by plans so far: fills less evictions.
  [[nodiscard]] std::int64_t gained_count() const { return gained_count_.load(); }

 private:
  using Clock = std::chrono::steady_clock;
  enum Count : std::size_t { kHits, kMisses, kFills, kCpu, kEvictions, kCounts };
  struct Layer {
    std::array<std::atomic<std::uint64_t>, kCounts> counts{};
    bool held = false;           // streamed, not computed yet
    std::uint64_t ticket = 0;    // of its streaming
    std::vector<char> streamed;  // [experts] whether the ticket brings it
  };

  void check(const RoutedTokens& routed) const;
  bool plan(const RoutedTokens& routed);
  void note_times(const RoutedTokens& routed, Clock::time_point began, Clock::time_point executed);
  void count_plan(Layer& layer, bool first_round);
  void run(Executor& executor, const RoutedTokens& routed, const std::int32_t* ids);
  void hold(std::size_t moe_layer_index, const std::int32_t* wanted);
  bool is_last_round() const;
  void place(std::size_t moe_layer_index);
  [[nodiscard]] bool arrives(const Layer& layer, std::size_t expert) const;
  void release(std::size_t moe_layer_index, const RoutedTokens* routed);
  [[nodiscard]] const std::byte* pooled(std::size_t moe_layer_index, std::size_t expert) const;

  ExpertCacheSpec spec_;
  FillLink& link_;
  CachePlanner planner_;
  std::vector<Layer> layers_;
  std::size_t kept_count_ = 0;
  std::size_t ahead_count_ = 1;
  // Of the call at hand.
  Scratch partial_;                        // [tokens][top_k][hidden]
  std::vector<std::int32_t> pending_;      // [tokens][top_k] experts that have no result yet
  std::vector<std::int32_t> now_, later_;  // [tokens][top_k] run before and after the fills
  std::vector<std::int32_t> physical_;     // [tokens][top_k]
  std::vector<const std::byte*> records_;  // [experts]
  std::vector<char> filled_;               // [experts]
  std::vector<Fill> fills_;                // [experts]
  std::vector<std::int32_t> cpu_, uses_;   // [experts]
  std::int32_t fills_count_ = 0;
  std::int32_t cpu_count_ = 0;
  CacheStats stats_{};
  std::vector<CallTimes> call_times_;
  std::atomic<std::uint64_t> executions_count_{0};
  std::atomic<std::uint64_t> streamed_count_{0};
  std::atomic<std::int64_t> gained_count_{0};
};

// The two ways through a cache, as programs know them.
class DecodeExperts final : public ExpertDispatch {
 public:
  explicit DecodeExperts(ExpertCache& cache) : cache_(cache) {}
  void dispatch(Executor& executor, const RoutedTokens& routed) override {
    cache_.decode(executor, routed);
  }

 private:
  ExpertCache& cache_;
};

class SweepExperts final : public ExpertDispatch {
 public:
  explicit SweepExperts(ExpertCache& cache) : cache_(cache) {}
  void dispatch(Executor& executor, const RoutedTokens& routed) override {
    cache_.sweep(executor, routed);
  }

 private:
  ExpertCache& cache_;
};

}  // namespace freetoken::exec
