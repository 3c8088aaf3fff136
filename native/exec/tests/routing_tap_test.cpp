// The tap: what it forwards, what it keeps, and where it stops keeping.
#include "routing_tap.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace {

using namespace freetoken::exec;

// Notes the calls; writes one number per output, as experts do.
class NotingExperts final : public ExpertDispatch {
 public:
  void dispatch(Executor&, const RoutedTokens& routed) override {
    calls.push_back(routed);
    if (fails) throw std::runtime_error("no experts");
    for (std::size_t one = 0; one < routed.tokens * routed.hidden; ++one) routed.out[one] = 7;
  }

  std::vector<RoutedTokens> calls;
  bool fails = false;
};

class RoutingTapTest : public ::testing::Test {
 protected:
  void route(std::size_t layer, const std::vector<std::int32_t>& ids) {
    out_.assign(ids.size() / kTopK * kHidden, 0);
    tap_.dispatch(executor_, {.moe_layer_index = layer,
                              .x = nullptr,
                              .ids = ids.data(),
                              .weights = nullptr,
                              .out = out_.data(),
                              .tokens = ids.size() / kTopK,
                              .top_k = kTopK,
                              .hidden = kHidden});
  }

  static constexpr std::size_t kTopK = 2, kHidden = 3;
  Executor executor_{std::vector<int>{0}, std::chrono::microseconds(1), "portable"};
  NotingExperts inner_;
  RoutingTap tap_{inner_};
  std::vector<float> out_;
};

TEST_F(RoutingTapTest, ForwardsEveryCallWhateverItKeeps) {
  const std::vector<std::int32_t> ids{3, 1, 2, 0};
  for (const bool on : {false, true}) {
    if (on) tap_.start(100);
    route(5, ids);
    const RoutedTokens& seen = inner_.calls.back();
    EXPECT_EQ(seen.moe_layer_index, 5U);
    EXPECT_EQ(seen.ids, ids.data());
    EXPECT_EQ(seen.out, out_.data());
    EXPECT_EQ(seen.tokens, 2U);
    EXPECT_EQ(out_, std::vector<float>(6, 7.0F));
  }
  EXPECT_EQ(inner_.calls.size(), 2U);
}

TEST_F(RoutingTapTest, KeepsNothingUnlessItIsOn) {
  route(0, {3, 1});
  EXPECT_TRUE(tap_.layers().empty());
  tap_.start(100);
  route(0, {3, 1});
  tap_.stop();
  EXPECT_TRUE(tap_.layers().empty());
  route(1, {3, 1});
  EXPECT_TRUE(tap_.layers().empty());
  EXPECT_TRUE(tap_.ids().empty());
}

TEST_F(RoutingTapTest, KeepsTheLayersOfAStepUntilTheyAreCleared) {
  tap_.start(100);
  route(0, {3, 1, 2, 65535});
  route(1, {});
  route(2, {4, 5});
  ASSERT_EQ(tap_.layers().size(), 3U);
  EXPECT_EQ(tap_.layers()[0].tokens, 2U);
  EXPECT_EQ(tap_.layers()[1].tokens, 0U);
  EXPECT_EQ(tap_.layers()[2].moe_layer_index, 2U);
  EXPECT_EQ(tap_.layers()[2].top_k, kTopK);
  EXPECT_EQ(tap_.ids(), (std::vector<std::uint16_t>{3, 1, 2, 65535, 4, 5}));
  tap_.clear();
  EXPECT_TRUE(tap_.layers().empty());
  route(0, {8, 9});
  EXPECT_EQ(tap_.ids(), (std::vector<std::uint16_t>{8, 9}));
}

TEST_F(RoutingTapTest, WhatHasNoRoomIsToldAndStillForwarded) {
  tap_.start(8);
  route(0, {1, 2, 3, 4});
  EXPECT_FALSE(tap_.overflowed());
  route(1, {1, 2, 3, 4});
  EXPECT_TRUE(tap_.overflowed());
  route(2, {1, 2});  // a step with a hole is of no use: nothing more is kept
  EXPECT_EQ(tap_.layers().size(), 1U);
  EXPECT_EQ(inner_.calls.size(), 3U);
  tap_.clear();
  EXPECT_FALSE(tap_.overflowed());
  for (int call = 0; call < 20; ++call) route(0, {});
  EXPECT_TRUE(tap_.overflowed());
  EXPECT_LE(tap_.layers().size(), 8U);
}

TEST_F(RoutingTapTest, AFaultOfTheExpertsIsPassedOn) {
  inner_.fails = true;
  tap_.start(100);
  EXPECT_THROW(route(0, {1, 2}), std::runtime_error);
}

}  // namespace
