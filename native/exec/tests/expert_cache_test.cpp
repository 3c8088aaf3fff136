// The cache against the bank it caches: whatever is resident, filled or left to the CPU, the same
// bits come out.
#include "expert_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <vector>

#include "support.h"

namespace freetoken::exec::test {
namespace {

constexpr std::size_t kHidden = 32;
constexpr std::size_t kIntermediate = 24;
constexpr std::size_t kLayers = 3;
constexpr std::size_t kExperts = 6;
constexpr std::size_t kTopK = 2;

struct Setup {
  bool cpu_kernel = true;
  std::int32_t fills_of_misses = 1;  // of m misses, at most
  std::size_t slots_count = 4;
  double rate_bytes_per_s = 0.0;
};

class Cached {
 public:
  explicit Cached(const Setup& setup)
      : record_bytes_(round_up(expert_layout({}, kHidden, kIntermediate, false).bytes, 4096)),
        pool_(kLayers * kExperts * record_bytes_ / sizeof(Bf16)),
        slots_(kLayers * kExperts * record_bytes_ / sizeof(Bf16)),
        slots_count_(static_cast<std::int32_t>(setup.slots_count)),
        fillable_(kLayers, 1),
        table_of_layer_(kLayers, 1),
        fill_count_(2 * (kExperts + 1), setup.fills_of_misses) {
    std::fill_n(fill_count_.begin(), kExperts + 1, -1);  // of a table that no layer goes by
    Random random(3);
    random.fill_bf16(pool_);
    const ExpertBank bank{.records = bytes(pool_),
                          .record_bytes = record_bytes_,
                          .layers_count = kLayers,
                          .experts_per_layer_count = kExperts,
                          .hidden = kHidden,
                          .intermediate = kIntermediate,
                          .format = {},
                          .has_bias = false,
                          .glu = {},
                          .fast = false};
    bank_ = std::make_unique<BankExperts>(bank);
    link_ = std::make_unique<FillLink>(FillLink::Layout{.bank = bytes(pool_),
                                                        .record_bytes = record_bytes_,
                                                        .experts_count = kLayers * kExperts,
                                                        .slots = bytes(slots_),
                                                        .slots_capacity = kLayers * kExperts},
                                       setup.rate_bytes_per_s);
    cache_ = std::make_unique<ExpertCache>(
        ExpertCacheSpec{.pool = bank,
                        .slots = bytes(slots_),
                        .arrays = {.slot_of_expert = slot_of_expert_.data(),
                                   .expert_of_slot = expert_of_slot_.data(),
                                   .slot_key = slot_key_.data(),
                                   .demanded_at = demanded_at_.data(),
                                   .score = score_.data(),
                                   .clock = &clock_,
                                   .slots_count = &slots_count_,
                                   .slots_capacity = kLayers * kExperts},
                        .order = {.half_life_ticks = 0, .ticks_per_layer = 0},
                        .cpu_kernel = setup.cpu_kernel,
                        .fillable = fillable_.data(),
                        .table_of_layer = table_of_layer_.data(),
                        .fill_count = fill_count_.data(),
                        .buckets_count = 1,
                        .misses_capacity = kExperts},
        *link_);
  }

  ExpertCache& cache() { return *cache_; }
  FillLink& link() { return *link_; }
  void set_fillable(std::size_t layer, bool fillable) { fillable_[layer] = fillable ? 1 : 0; }
  void set_slots_count(std::int32_t count) { slots_count_ = count; }

  // A layer of a step through the cache and, for comparison, through the pool.
  void expect_same(Executor& executor, std::size_t layer, std::vector<std::int32_t> ids,
                   bool sweep) {
    const std::size_t tokens = ids.size() / kTopK;
    Random random(layer + tokens);
    std::vector<Bf16> x(tokens * kHidden);
    random.fill_bf16(x);
    std::vector<float> weights(tokens * kTopK);
    random.fill(weights);
    std::vector<float> through(tokens * kHidden);
    std::vector<float> expected(tokens * kHidden);
    RoutedTokens routed{.moe_layer_index = layer,
                        .x = x.data(),
                        .ids = ids.data(),
                        .weights = weights.data(),
                        .out = expected.data(),
                        .tokens = tokens,
                        .top_k = kTopK,
                        .hidden = kHidden};
    bank_->dispatch(executor, routed);
    routed.out = through.data();
    sweep ? cache_->sweep(executor, routed) : cache_->decode(executor, routed);
    EXPECT_EQ(through, expected) << "layer " << layer;
  }
  void expect_integrity() {
    for (std::int32_t slot = 0; slot < slots_count_; ++slot) {
      const std::int32_t expert = expert_of_slot_[static_cast<std::size_t>(slot)];
      if (expert >= 0) {
        EXPECT_EQ(slot_of_expert_[static_cast<std::size_t>(expert)], slot);
      }
    }
    const auto resident =
        std::ranges::count_if(slot_of_expert_, [](std::int32_t slot) { return slot >= 0; });
    EXPECT_EQ(cache_->gained_count(), resident);
  }

 private:
  template <class T>
  static std::byte* bytes(Guarded<T>& memory) {
    return reinterpret_cast<std::byte*>(memory.data());
  }

  std::size_t record_bytes_;
  Guarded<Bf16> pool_;
  Guarded<Bf16> slots_;
  std::vector<std::int32_t> slot_of_expert_ = std::vector<std::int32_t>(kLayers * kExperts, -1);
  std::vector<std::int32_t> expert_of_slot_ = std::vector<std::int32_t>(kLayers * kExperts, -1);
  std::vector<std::int64_t> slot_key_ = std::vector<std::int64_t>(kLayers * kExperts);
  std::vector<std::int64_t> demanded_at_ = std::vector<std::int64_t>(kLayers * kExperts, -1);
  std::vector<std::int64_t> score_ = std::vector<std::int64_t>(kLayers * kExperts);
  std::int64_t clock_ = 0;
  std::int32_t slots_count_;
  std::vector<std::int32_t> fillable_, table_of_layer_, fill_count_;
  std::unique_ptr<BankExperts> bank_;
  std::unique_ptr<FillLink> link_;
  std::unique_ptr<ExpertCache> cache_;
};

std::vector<std::int32_t> random_ids(Random& random, std::size_t tokens) {
  std::vector<std::int32_t> ids;
  for (std::size_t token = 0; token < tokens; ++token) {
    const auto first = static_cast<std::int32_t>(random.bits() % kExperts);
    ids.push_back(first);
    const auto second = static_cast<std::int32_t>(random.bits() % kExperts);
    ids.push_back(second == first || random.bits() % 8 == 0 ? -1 : second);
  }
  return ids;
}

TEST(ExpertCache, DecodeGivesTheBitsOfThePool) {
  Executor executor({0, 1}, std::chrono::microseconds(50), "auto");
  for (const bool cpu_kernel : {true, false}) {
    for (const std::size_t slots : {0, 1, 2, 5, 18}) {
      Cached cached({.cpu_kernel = cpu_kernel, .fills_of_misses = 2, .slots_count = slots});
      cached.set_fillable(1, false);
      Random random(slots);
      for (std::size_t step = 0; step < 20; ++step) {
        for (std::size_t layer = 0; layer < kLayers; ++layer) {
          cached.expect_same(executor, layer, random_ids(random, 1 + step % 5), false);
        }
        cached.expect_integrity();
      }
      const LayerCounts unpinned = cached.cache().layer_counts(1);
      EXPECT_EQ(unpinned.fills, 0U);
      EXPECT_EQ(unpinned.cpu, unpinned.misses);
      for (const std::size_t layer : {0, 2}) {
        const LayerCounts counts = cached.cache().layer_counts(layer);
        EXPECT_EQ(counts.misses, counts.fills + counts.cpu);
        EXPECT_GT(counts.misses, 0U);
        if (slots == 0) {
          EXPECT_EQ(counts.fills, 0U);
        }
        if (!cpu_kernel && slots > 0) {
          EXPECT_EQ(counts.cpu, 0U);
        }
        if (slots == 18) {
          EXPECT_EQ(counts.evictions, 0U);
        }
      }
    }
  }
}

TEST(ExpertCache, ASweepStreamsLayersWhileDecodeStepsRunBetween) {
  Executor executor({0, 1}, std::chrono::microseconds(50), "auto");
  for (const std::size_t slots : {0, 3, 12, 18}) {
    Cached cached({.fills_of_misses = 2, .slots_count = slots, .rate_bytes_per_s = 20e6});
    cached.cache().set_kept_count(2);
    Random random(slots + 1);
    for (int sweep = 0; sweep < 3; ++sweep) {
      cached.cache().prefetch(0, nullptr);
      for (std::size_t layer = 0; layer < kLayers; ++layer) {
        cached.expect_same(executor, layer, random_ids(random, 9), true);
        for (std::size_t other = 0; other < kLayers; ++other) {
          cached.expect_same(executor, other, random_ids(random, 1), false);
        }
        cached.expect_integrity();
      }
    }
    if (slots >= 12) {
      EXPECT_GT(cached.cache().streamed_count(), kExperts);
    }
  }
}

TEST(ExpertCache, LettingGoInTheMiddleOfASweepFreesTheSlots) {
  Executor executor({0, 1}, std::chrono::microseconds(50), "auto");
  Cached cached({.cpu_kernel = false, .slots_count = 12, .rate_bytes_per_s = 20e6});
  Random random(5);
  cached.expect_same(executor, 0, random_ids(random, 9), true);  // layer 1 is on the way
  cached.cache().let_go();
  EXPECT_NO_THROW(cached.link().wait(1));
  cached.set_slots_count(12);
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    cached.expect_same(executor, layer, {0, 1, 2, 3, 4, 5}, false);
    EXPECT_EQ(cached.cache().layer_counts(layer).cpu, 0U);
  }
  cached.expect_same(executor, 1, random_ids(random, 9), true);
  cached.expect_integrity();
}

TEST(ExpertCache, OnlyWhatIsKnownAheadIsStreamed) {
  Executor executor({0, 1}, std::chrono::microseconds(50), "auto");
  Cached cached({.slots_count = 18});
  const std::vector<std::int32_t> wanted{0, 1, 0, 0, 1, 0};
  cached.cache().prefetch(2, wanted.data());
  EXPECT_EQ(cached.cache().streamed_count(), 2U);
  cached.expect_same(executor, 2, {1, 4, 4, -1, 0, 1}, true);
  EXPECT_EQ(cached.cache().streamed_count(), 2U);
}

TEST(ExpertCache, TellsWhatTheBranchesOfACallTook) {
  Executor executor({0, 1}, std::chrono::microseconds(50), "auto");
  Cached cached({.fills_of_misses = 2, .slots_count = 4, .rate_bytes_per_s = 2e6});
  cached.expect_same(executor, 1, {0, 1, 2, 3, 4, -1}, false);
  cached.set_fillable(2, false);
  cached.expect_same(executor, 2, {0, 1}, false);
  cached.expect_same(executor, 0, {-1, -1}, false);
  const std::vector<CallTimes> taken = cached.cache().take_call_times();
  ASSERT_EQ(taken.size(), 2U);  // the last call had no misses
  EXPECT_EQ(taken[0].layer, 1);
  EXPECT_EQ(taken[0].bucket, 0);
  EXPECT_EQ(taken[0].misses, 5);
  EXPECT_EQ(taken[0].fills, 2);
  EXPECT_EQ(taken[0].cpu, 3);
  // two records at the link's rate
  EXPECT_GE(taken[0].fill_s, 2 * 4096 / 2e6);
  EXPECT_GT(taken[0].cpu_s, 0.0);
  EXPECT_GE(taken[0].layer_s, taken[0].fill_s);
  EXPECT_EQ(taken[1].fills, 0);
  EXPECT_EQ(taken[1].fill_s, 0.0);
  EXPECT_GE(taken[1].layer_s, taken[1].cpu_s);
  EXPECT_TRUE(cached.cache().take_call_times().empty());
}

TEST(ExpertCache, RefusesWhatDoesNotExist) {
  Executor executor({0, 1}, std::chrono::microseconds(50), "auto");
  Cached cached({});
  EXPECT_THROW(cached.expect_same(executor, kLayers, {0, 1}, false), std::invalid_argument);
  EXPECT_THROW(cached.expect_same(executor, 0, {0, kExperts}, false), std::invalid_argument);
  EXPECT_THROW(cached.cache().prefetch(kLayers, nullptr), std::invalid_argument);
  EXPECT_THROW((void)cached.cache().layer_counts(kLayers), std::invalid_argument);
  cached.expect_same(executor, 0, {0, 1}, false);
}

}  // namespace
}  // namespace freetoken::exec::test
