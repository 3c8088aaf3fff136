// The CPU's part of a captured step, started as a driver and as a stream would.
#include "cpu_branch.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "support.h"

namespace freetoken::exec::test {
namespace {

constexpr std::size_t kHidden = 32;
constexpr std::size_t kIntermediate = 16;
constexpr std::size_t kLayers = 3;
constexpr std::size_t kExperts = 4;
constexpr std::size_t kTopK = 2;
constexpr std::size_t kTokens = 4;
constexpr float kUntouched = 77.0F;

class Branch {
 public:
  explicit Branch(bool with_doorbells)
      : record_bytes_(round_up(expert_layout({}, kHidden, kIntermediate, false).bytes, 4096)),
        pool_(kLayers * kExperts * record_bytes_ / sizeof(Bf16)) {
    Random random(3);
    random.fill_bf16(pool_);
    random.fill_bf16(x_);
    random.fill(weights_);
    const ExpertBank bank{.records = reinterpret_cast<std::byte*>(pool_.data()),
                          .record_bytes = record_bytes_,
                          .layers_count = kLayers,
                          .experts_per_layer_count = kExperts,
                          .hidden = kHidden,
                          .intermediate = kIntermediate,
                          .format = {},
                          .has_bias = false,
                          .glu = {},
                          .fast = false};
    branch_ = std::make_unique<CpuBranch>(
        executor_, bank,
        CpuBranchBuffers{.x = x_.data(),
                         .ids = ids_.data(),
                         .weights = weights_.data(),
                         .tokens = &tokens_,
                         .y = y_.data(),
                         .tokens_capacity = kTokens,
                         .top_k = kTopK},
        with_doorbells ? Doorbells{.ring = ring_.data(), .done = done_.data()}
                       : Doorbells{.ring = nullptr, .done = nullptr});
  }

  CpuBranch& branch() { return *branch_; }
  void put(std::int32_t tokens, const std::vector<std::int32_t>& ids) {
    tokens_ = tokens;
    std::ranges::copy(ids, ids_.begin());
    std::ranges::fill(y_, kUntouched);
  }
  // What the rows of this layer have to be; asked while the branch rests.
  void expect_done(std::size_t layer) {
    std::vector<float> expected(y_.size(), kUntouched);
    executor_.experts(
        {.x = x_.data(),
         .expert_ids = ids_.data(),
         .weights = weights_.data(),
         .y = expected.data(),
         .tokens = static_cast<std::size_t>(tokens_),
         .top_k = kTopK,
         .hidden = kHidden,
         .intermediate = kIntermediate,
         .bank = reinterpret_cast<std::byte*>(pool_.data()) + layer * kExperts * record_bytes_,
         .record_bytes = record_bytes_,
         .experts_count = kExperts,
         .format = {},
         .glu = {},
         .keep_absent = true});
    EXPECT_EQ(y_, expected);
  }
  // As a stream does: write the word, then wait for the answer.
  void ring(std::uint32_t layer) {
    ring_[1] = layer;
    std::atomic_ref(ring_[0]).store(++number_, std::memory_order_release);
  }
  void await_answer() {
    const std::atomic_ref done(done_[0]);
    while (done.load(std::memory_order_acquire) != number_) std::this_thread::yield();
  }
  void run(std::size_t layer) { CpuBranch::host_function()(branch_->task(layer)); }

 private:
  std::size_t record_bytes_;
  Guarded<Bf16> pool_;
  std::vector<Bf16> x_ = std::vector<Bf16>(kTokens * kHidden);
  std::vector<std::int32_t> ids_ = std::vector<std::int32_t>(kTokens * kTopK, -1);
  std::vector<float> weights_ = std::vector<float>(kTokens * kTopK);
  std::vector<float> y_ = std::vector<float>(kTokens * kTopK * kHidden);
  std::int32_t tokens_ = 0;
  std::uint32_t number_ = 0xfffffffa;  // the numbers begin anew on the way
  std::array<std::uint32_t, 2> ring_{number_, 0};
  std::array<std::uint32_t, 1> done_{number_};
  Executor executor_{{0, 1}, std::chrono::microseconds(50), "auto"};
  std::unique_ptr<CpuBranch> branch_;
};

TEST(CpuBranch, AHostFunctionComputesWhatIsLeftToTheCpu) {
  Branch one(false);
  one.put(3, {0, -1, -1, 2, 3, 1});
  for (std::size_t layer = 0; layer < kLayers; ++layer) {
    one.run(layer);
    one.expect_done(layer);
  }
  EXPECT_EQ(one.branch().executions_count(), 4 * kLayers);
  EXPECT_EQ(one.branch().calls_count(), kLayers);
  EXPECT_GT(one.branch().busy_s(), 0.0);
  EXPECT_EQ(one.branch().take_fault(), "");
}

TEST(CpuBranch, NothingIsTouchedWhereNothingIsLeftToIt) {
  Branch one(false);
  one.put(2, {-1, -1, -1, -1});
  one.run(1);
  one.put(0, {});
  one.run(1);
  one.expect_done(1);
  EXPECT_EQ(one.branch().executions_count(), 0U);
}

TEST(CpuBranch, AFaultIsKeptUntilItIsAskedFor) {
  Branch one(false);
  one.put(1, {0, kExperts});
  one.run(1);
  one.put(kTokens + 1, {});
  one.run(2);
  EXPECT_NE(one.branch().take_fault().find("MoE layer 1"), std::string::npos);
  EXPECT_EQ(one.branch().take_fault(), "");
  one.put(1, {0, 1});
  one.run(1);
  one.expect_done(1);
}

TEST(CpuBranch, ADoorbellIsAnsweredAsOftenAsItRings) {
  Branch one(true);
  for (std::int32_t step = 0; step < 20; ++step) {
    one.put(2, {0, 3, -1, step % static_cast<std::int32_t>(kExperts)});
    one.branch().begin_step();
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      one.ring(layer);
      one.await_answer();
      one.expect_done(layer);
    }
    one.branch().end_step();
  }
  EXPECT_EQ(one.branch().calls_count(), 20 * kLayers);
}

TEST(CpuBranch, AStepThatNeverRingsCanBeEnded) {
  Branch one(true);
  one.put(1, {0, 1});
  one.branch().begin_step();
  one.branch().begin_step();
  one.ring(2);
  one.await_answer();
  one.branch().end_step();
  one.branch().end_step();
  EXPECT_EQ(one.branch().calls_count(), 1U);
  one.branch().begin_step();  // and is still watched when the branch goes
}

TEST(CpuBranch, WhatRingsBetweenStepsIsAnsweredInTheNext) {
  Branch one(true);
  one.put(1, {0, 1});
  one.ring(1);
  EXPECT_EQ(one.branch().calls_count(), 0U);
  one.branch().begin_step();
  one.await_answer();
  one.expect_done(1);
}

TEST(CpuBranch, ALayerThatDoesNotExistIsAFaultAndAnswered) {
  Branch one(true);
  one.branch().begin_step();
  one.ring(kLayers);
  one.await_answer();
  EXPECT_NE(one.branch().take_fault().find("no such MoE layer"), std::string::npos);
}

TEST(CpuBranch, RefusesWhatDoesNotExist) {
  Branch one(false);
  EXPECT_THROW((void)one.branch().task(kLayers), std::invalid_argument);
  EXPECT_THROW(one.branch().begin_step(), std::invalid_argument);
}

}  // namespace
}  // namespace freetoken::exec::test
