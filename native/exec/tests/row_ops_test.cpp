// Row operations of every instruction set against doubles.
#include "row_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "emulated_kernels.h"

namespace {

using namespace freetoken::exec;

class RowOps : public testing::TestWithParam<std::string> {
 protected:
  const Kernels& kernels() const { return *test::kernels_named(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(EveryIsa, RowOps, testing::ValuesIn(test::tested_isas()),
                         [](const auto& tested) { return tested.param; });

std::vector<float> random_floats(std::size_t count, unsigned seed, float spread = 1.0F,
                                 float mean = 0.0F) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(mean, spread);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

std::vector<Bf16> to_bf16(const std::vector<float>& values) {
  std::vector<Bf16> words;
  for (const float value : values) words.push_back(float_to_bf16(value));
  return words;
}

TEST(Rope, TurnsPairsByTheAngleOfTheirRow) {
  constexpr std::size_t kRows = 5, kHeads = 3, kSize = 20, kRotary = 12, kStride = 70;
  const std::vector<std::int32_t> positions = {4, 0, 2, 2, 1};
  std::vector<float> table;
  for (std::size_t position = 0; position < 5; ++position) {
    for (const bool sine : {false, true}) {
      for (std::size_t pair = 0; pair < kRotary / 2; ++pair) {
        const double angle = static_cast<double>(position * 7 + pair);
        table.push_back(static_cast<float>(sine ? std::sin(angle) : std::cos(angle)));
      }
    }
  }
  const std::vector<float> before = random_floats(kRows * kStride, 1);
  std::vector<float> x = before;
  rope_rows({.x = x.data(),
             .row_stride = kStride,
             .heads = kHeads,
             .head_size = kSize,
             .rotary_size = kRotary,
             .rotations = table.data(),
             .positions = positions.data()},
            1, kRows);
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t i = 0; i < kStride; ++i) {
      const std::size_t at = row * kStride + i, lane = i % kSize;
      if (row == 0 || i >= kHeads * kSize || lane >= kRotary) {
        EXPECT_EQ(x[at], before[at]) << "row " << row << " element " << i;
        continue;
      }
      const bool second = lane >= kRotary / 2;
      const std::size_t pair = lane % (kRotary / 2);
      const double angle = static_cast<double>(static_cast<std::size_t>(positions[row]) * 7 + pair);
      const double mine = before[at];
      const double other = before[second ? at - kRotary / 2 : at + kRotary / 2];
      const double expected = mine * std::cos(angle) + (second ? other : -other) * std::sin(angle);
      EXPECT_NEAR(x[at], expected, 3e-7 * (std::abs(mine) + std::abs(other)));
    }
  }
}

TEST(AddRows, AddsTheGivenRowsOnly) {
  std::vector<float> total = {1, 2, 3, 4, 5, 6};
  const std::vector<float> addend = {10, 20, 30, 40, 50, 60};
  add_rows(total.data(), addend.data(), 2, 1, 2);
  EXPECT_EQ(total, (std::vector<float>{1, 2, 33, 44, 5, 6}));
}

TEST_P(RowOps, HeadNormIsTheNormRoundedToBf16) {
  constexpr std::size_t kRows = 3, kHeads = 2;
  for (const std::size_t size : {std::size_t{1}, std::size_t{24}, std::size_t{128}}) {
    const std::size_t stride = kHeads * size + 5;
    const std::vector<float> before = random_floats(kRows * stride, 2, 3.0F);
    const std::vector<float> weight = random_floats(size, 3);
    std::vector<float> x = before;
    head_norm_rows(kernels().rows,
                   {.x = x.data(),
                    .row_stride = stride,
                    .heads = kHeads,
                    .head_size = size,
                    .weight = weight.data(),
                    .eps = 1e-6F},
                   0, kRows);
    std::vector<Bf16> expected(size);
    for (std::size_t row = 0; row < kRows; ++row) {
      for (std::size_t head = 0; head < kHeads; ++head) {
        const std::size_t start = row * stride + head * size;
        kernels().rms_norm(before.data() + start, weight.data(), size, 1e-6F, expected.data());
        double squares = 0;
        for (std::size_t i = 0; i < size; ++i) {
          squares += static_cast<double>(before[start + i]) * before[start + i];
        }
        const double root = std::sqrt(squares / static_cast<double>(size) + 1e-6);
        for (std::size_t i = 0; i < size; ++i) {
          EXPECT_EQ(x[start + i], bf16_to_float(expected[i]));
          const double exact = before[start + i] / root * weight[i];
          EXPECT_NEAR(x[start + i], exact, std::abs(exact) * 0x1.01p-8);
        }
      }
      for (std::size_t i = kHeads * size; i < stride; ++i) {
        EXPECT_EQ(x[row * stride + i], before[row * stride + i]) << "beyond the heads";
      }
    }
  }
}

struct Routed {
  std::vector<float> logits;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

// The weights of the router come back as logits where x has a single one.
Routed route(const Kernels& kernels, const Router& router, const std::vector<float>& w,
             const std::vector<Bf16>& x, std::size_t hidden) {
  validate(router);
  const std::size_t rows = x.size() / hidden;
  std::vector<float> packed(packed_router_floats(router.experts, hidden));
  pack_router(w.data(), router.experts, hidden, packed.data());
  Routed routed{.logits = std::vector<float>(rows * ((router.experts + 15) / 16 * 16), NAN),
                .ids = std::vector<std::int32_t>(rows * router.top_k, -1),
                .weights = std::vector<float>(rows * router.top_k, NAN)};
  route_rows(kernels.rows,
             {.router = &router,
              .packed = packed.data(),
              .x = x.data(),
              .hidden = hidden,
              .logits = routed.logits.data(),
              .expert_ids = routed.ids.data(),
              .weights = routed.weights.data()},
             0, rows);
  return routed;
}

Routed route_logits(const Kernels& kernels, const Router& router,
                    const std::vector<float>& logits) {
  return route(kernels, router, logits, {float_to_bf16(1.0F)}, 1);
}

TEST_P(RowOps, RouterLogitsAreThoseOfDoublesAndOfARowAlone) {
  for (const std::size_t experts :
       {std::size_t{1}, std::size_t{8}, std::size_t{60}, std::size_t{128}, std::size_t{512}}) {
    constexpr std::size_t kHidden = 333, kRows = 11;
    const std::vector<float> w = random_floats(experts * kHidden, 5);
    const std::vector<Bf16> x = to_bf16(random_floats(kRows * kHidden, 6));
    const Router router{.experts = experts, .top_k = 1};
    const Routed routed = route(kernels(), router, w, x, kHidden);
    const std::size_t stride = (experts + 15) / 16 * 16;
    for (std::size_t row = 0; row < kRows; ++row) {
      const std::vector<Bf16> one(x.begin() + static_cast<std::ptrdiff_t>(row * kHidden),
                                  x.begin() + static_cast<std::ptrdiff_t>((row + 1) * kHidden));
      const Routed alone = route(kernels(), router, w, one, kHidden);
      for (std::size_t expert = 0; expert < experts; ++expert) {
        double sum = 0, size = 0;
        for (std::size_t i = 0; i < kHidden; ++i) {
          const double product =
              static_cast<double>(w[expert * kHidden + i]) * bf16_to_float(one[i]);
          sum += product;
          size += std::abs(product);
        }
        EXPECT_NEAR(routed.logits[row * stride + expert], sum, 1e-6 * size);
        EXPECT_EQ(routed.logits[row * stride + expert], alone.logits[expert]) << "same bits";
      }
      EXPECT_EQ(routed.ids[row], alone.ids[0]);
    }
  }
}

// Scores and choice in doubles, from the formulas of the families.
void expect_like_doubles(const Kernels& kernels, const Router& router,
                         const std::vector<float>& logits) {
  const std::size_t experts = router.experts;
  std::vector<double> values(logits.begin(), logits.end()), scores(experts);
  for (std::size_t i = 0; i < experts; ++i) {
    if (router.logit_bias != nullptr) values[i] += router.logit_bias[i];
  }
  const double peak = *std::max_element(values.begin(), values.end());
  double sum = 0;
  for (const double value : values) sum += std::exp(value - peak);
  for (std::size_t i = 0; i < experts; ++i) {
    switch (router.scoring) {
      case Scoring::kSoftmax:
        scores[i] = std::exp(values[i] - peak) / sum;
        break;
      case Scoring::kSoftmaxOfChosen:
        scores[i] = values[i];
        break;
      case Scoring::kSigmoid:
        scores[i] = 1 / (1 + std::exp(-values[i]));
        break;
      case Scoring::kSqrtSoftplus:
        scores[i] = std::sqrt(std::log1p(std::exp(values[i])));
        break;
    }
  }
  std::vector<double> choice = scores;
  for (std::size_t i = 0; i < experts; ++i) {
    if (router.selection_bias != nullptr) choice[i] += router.selection_bias[i];
  }
  const std::size_t group_size = experts / router.groups;
  std::vector<std::pair<double, std::size_t>> groups;
  for (std::size_t group = 0; group < router.groups; ++group) {
    std::vector<double> part(
        choice.begin() + static_cast<std::ptrdiff_t>(group * group_size),
        choice.begin() + static_cast<std::ptrdiff_t>((group + 1) * group_size));
    std::sort(part.rbegin(), part.rend());
    groups.emplace_back(-(part[0] + (group_size > 1 ? part[1] : 0.0)), group);
  }
  std::sort(groups.begin(), groups.end());
  std::vector<std::size_t> order;
  for (std::size_t g = 0; g < router.kept_groups; ++g) {
    for (std::size_t i = 0; i < group_size; ++i) order.push_back(groups[g].second * group_size + i);
  }
  std::sort(order.begin(), order.end());
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return choice[a] > choice[b]; });
  order.resize(router.top_k);
  std::vector<double> weights;
  const bool chosen = router.scoring == Scoring::kSoftmaxOfChosen;
  // The families with independent scores divide by their sum and a little more.
  double total = chosen || router.scoring == Scoring::kSoftmax ? 0.0 : 1e-20;
  for (const std::size_t id : order) {
    weights.push_back(chosen ? std::exp(scores[id] - scores[order[0]]) : scores[id]);
    total += weights.back();
  }
  const bool divide = router.renormalise || chosen;
  const Routed routed = route_logits(kernels, router, logits);
  for (std::size_t i = 0; i < router.top_k; ++i) {
    EXPECT_EQ(routed.ids[i], static_cast<std::int32_t>(order[i])) << i;
    const double expected = weights[i] / (divide ? total : 1.0) * router.routed_scale;
    EXPECT_NEAR(routed.weights[i], expected, std::abs(expected) * 3e-6) << i;
  }
}

TEST_P(RowOps, EveryScoringAgreesWithDoubles) {
  const std::vector<float> bias = random_floats(512, 7, 0.3F);
  for (const Scoring scoring :
       {Scoring::kSoftmax, Scoring::kSoftmaxOfChosen, Scoring::kSigmoid, Scoring::kSqrtSoftplus}) {
    for (const std::size_t experts :
         {std::size_t{8}, std::size_t{60}, std::size_t{256}, std::size_t{512}}) {
      for (const float mean : {0.0F, -60.0F, 30.0F}) {
        const bool chosen = scoring == Scoring::kSoftmaxOfChosen;
        const bool softmax = scoring == Scoring::kSoftmax;
        Router router{.scoring = scoring,
                      .experts = experts,
                      .top_k = std::min<std::size_t>(experts / 2, 32),
                      .renormalise = experts != 60,
                      .routed_scale = softmax || chosen ? 1.0F : 2.5F,
                      .logit_bias = chosen ? bias.data() : nullptr};
        // Far from 0 the scores of neighbours round to equals, which doubles tell apart.
        if (!softmax && !chosen && mean < 30.0F) router.selection_bias = bias.data();
        if (scoring == Scoring::kSigmoid && mean > 0.0F) continue;
        expect_like_doubles(kernels(), router, random_floats(experts, 8, 2.0F, mean));
      }
    }
  }
}

TEST_P(RowOps, ChoiceIsLimitedToTheBestGroups) {
  const std::vector<float> bias = random_floats(256, 9, 0.3F, -2.0F);  // all choices below zero
  for (const std::size_t groups : {std::size_t{2}, std::size_t{8}, std::size_t{256}}) {
    expect_like_doubles(kernels(),
                        {.scoring = Scoring::kSigmoid,
                         .experts = 256,
                         .top_k = std::min<std::size_t>(groups == 256 ? 4 : 8, 32),
                         .renormalise = true,
                         .routed_scale = 2.5F,
                         .groups = groups,
                         .kept_groups = std::min<std::size_t>(groups / 2, 4),
                         .selection_bias = bias.data()},
                        random_floats(256, 10, 1.0F));
  }
}

TEST_P(RowOps, EqualsGoByTheLowerId) {
  for (const Scoring scoring :
       {Scoring::kSoftmax, Scoring::kSoftmaxOfChosen, Scoring::kSigmoid, Scoring::kSqrtSoftplus}) {
    const Router router{.scoring = scoring, .experts = 40, .top_k = 32, .renormalise = true};
    std::vector<float> logits(40, -1.0F);
    logits[33] = logits[7] = 0.5F;
    const Routed routed = route_logits(kernels(), router, logits);
    std::vector<std::int32_t> expected(32);
    std::iota(expected.begin() + 2, expected.end(), 0);
    std::for_each(expected.begin() + 2, expected.end(), [](auto& id) { id += id >= 7 ? 1 : 0; });
    expected[0] = 7;
    expected[1] = 33;
    EXPECT_EQ(routed.ids, expected);
    EXPECT_NEAR(std::accumulate(routed.weights.begin(), routed.weights.end(), 0.0), 1.0, 1e-6);
  }
}

TEST_P(RowOps, VeryNegativeLogitsStillGiveWeights) {
  for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSoftmaxOfChosen}) {
    const Router router{.scoring = scoring, .experts = 8, .top_k = 2, .renormalise = true};
    const Routed routed = route_logits(kernels(), router, std::vector<float>(8, -3e38F));
    EXPECT_EQ(routed.weights, (std::vector<float>{0.5F, 0.5F}));
  }
  for (const Scoring scoring : {Scoring::kSigmoid, Scoring::kSqrtSoftplus}) {
    const Router router{.scoring = scoring, .experts = 8, .top_k = 2, .renormalise = true};
    const Routed routed = route_logits(kernels(), router, std::vector<float>(8, -3e38F));
    for (const float weight : routed.weights) EXPECT_TRUE(weight >= 0.0F && weight < 1e-15F);
  }
}

TEST_P(RowOps, RowsThatAreNotNumbersStillNameExperts) {
  const Router router{.experts = 24, .top_k = 4, .renormalise = true};
  const Routed routed = route_logits(kernels(), router, std::vector<float>(24, NAN));
  EXPECT_EQ(routed.ids, (std::vector<std::int32_t>{0, 1, 2, 3}));
  for (const float weight : routed.weights) EXPECT_TRUE(std::isnan(weight));
}

TEST_P(RowOps, RoutesTheSameOnEveryInstructionSet) {
  const std::vector<float> w = random_floats(std::size_t{60} * 200, 11);
  const std::vector<Bf16> x = to_bf16(random_floats(std::size_t{7} * 200, 12));
  for (const Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid}) {
    const Router router{.scoring = scoring, .experts = 60, .top_k = 8, .renormalise = true};
    const Routed mine = route(kernels(), router, w, x, 200);
    const Routed portable = route(*select_kernels("portable"), router, w, x, 200);
    EXPECT_EQ(mine.ids, portable.ids);
    EXPECT_EQ(mine.weights, portable.weights);
  }
}

TEST(Router, WrongNumbersAreRefused) {
  EXPECT_NO_THROW(validate(Router{.experts = 512, .top_k = 32}));
  const Router wrong[] = {
      {.experts = 0, .top_k = 1},
      {.experts = 2000, .top_k = 1},
      {.experts = 8, .top_k = 0},
      {.experts = 8, .top_k = 9},
      {.experts = 512, .top_k = 65},
      {.experts = 8, .top_k = 2, .groups = 3},
      {.experts = 8, .top_k = 2, .groups = 0},
      {.experts = 8, .top_k = 2, .groups = 4, .kept_groups = 5},
      {.experts = 8, .top_k = 3, .groups = 4, .kept_groups = 1},
  };
  for (const Router& router : wrong) EXPECT_THROW(validate(router), std::invalid_argument);
}

}  // namespace
