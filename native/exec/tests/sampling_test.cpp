// Sampling without Python: the generator, draws against plain doubles, rows over workers.
#include "sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "philox.h"
#include "worker_pool.h"

namespace {

using namespace freetoken::exec;

// The known answers that the authors of Philox publish with it (Random123, philox4x64-10).
TEST(Philox, GivesThePublishedAnswers) {
  constexpr std::uint64_t kOnes = ~std::uint64_t{0};
  EXPECT_EQ(philox4x64({0, 0, 0, 0}, {0, 0}),
            (PhiloxCounter{0x16554d9eca36314c, 0xdb20fe9d672d0fdc, 0xd7e772cee186176b,
                           0x7e68b68aec7ba23b}));
  EXPECT_EQ(philox4x64({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (PhiloxCounter{0x87b092c3013fe90b, 0x438c3c67be8d0224, 0x9cc7d7c69cd777b6,
                           0xa09caebf594f0ba0}));
  EXPECT_EQ(
      philox4x64({0x243f6a8885a308d3, 0x13198a2e03707344, 0xa4093822299f31d0, 0x082efa98ec4e6c89},
                 {0x452821e638d01377, 0xbe5466cf34e90c6c}),
      (PhiloxCounter{0xa528f45403e61d95, 0x38c72dbd566e9788, 0xa5a1610e72fd18b5,
                     0x57bd43b5e52b7fe6}));
}

TEST(Philox, CarriesIntoTheSecondWord) {
  const std::uint64_t last = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(philox_draw(3, last), philox4x64({0, 1, 0, 0}, {3, 0})[0]);
  EXPECT_EQ(philox_draw(3, 6), philox4x64({7, 0, 0, 0}, {3, 0})[0]);
}

std::vector<float> random_row(std::size_t vocab, float spread, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, spread);
  std::vector<float> row(vocab);
  for (float& logit : row) logit = normal(generator);
  return row;
}

SampleResult sample(const std::vector<float>& row, SamplingParams params,
                    std::uint64_t draw_index) {
  SamplingScratch scratch;
  params.draw_index = draw_index;
  return sample_row(row.data(), row.size(), params, scratch);
}

// Shares of the tokens that pass the filters, the slow and obvious way.
std::map<std::int64_t, double> shares_of(const std::vector<float>& row,
                                         const SamplingParams& params) {
  const double peak = *std::max_element(row.begin(), row.end());
  std::vector<double> weights;
  for (const float logit : row) weights.push_back(std::exp((logit - peak) / params.temperature));
  std::vector<std::size_t> order(row.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return weights[a] > weights[b]; });
  if (params.top_k > 0 && static_cast<std::size_t>(params.top_k) < order.size()) {
    order.resize(static_cast<std::size_t>(params.top_k));
  }
  double sum = 0;
  for (const std::size_t id : order) sum += weights[id];
  std::map<std::int64_t, double> shares;
  double running = 0;
  for (const std::size_t id : order) {
    if (running >= params.top_p * sum || weights[id] < params.min_p) break;
    running += weights[id];
    shares[static_cast<std::int64_t>(id)] = weights[id];
  }
  double kept = 0;
  for (const auto& [id, weight] : shares) kept += weight;
  for (auto& [id, weight] : shares) weight /= kept;
  return shares;
}

TEST(Sampling, DrawsFollowTheFilteredDistribution) {
  const SamplingParams cases[] = {
      {.temperature = 0.7},
      {.temperature = 1.5, .top_k = 5},
      {.temperature = 1.0, .top_p = 0.8},
      {.temperature = 1.0, .min_p = 0.2},
      {.temperature = 2.0, .top_k = 30, .top_p = 0.9, .min_p = 0.05, .seed = 77},
  };
  constexpr int kDraws = 20000;
  const std::vector<float> row = random_row(40, 2.0F, 1);
  for (const SamplingParams& params : cases) {
    const auto shares = shares_of(row, params);
    std::map<std::int64_t, int> counts;
    for (int draw = 0; draw < kDraws; ++draw) {
      ++counts[sample(row, params, static_cast<std::uint64_t>(draw)).token];
    }
    for (const auto& [token, count] : counts) {
      ASSERT_TRUE(shares.contains(token)) << "token " << token << " does not pass the filters";
    }
    for (const auto& [token, share] : shares) {
      // Five standard deviations: the draws are fixed, so this passes always or never.
      const double allowed = 5.0 * std::sqrt(share * (1.0 - share) / kDraws) + 1e-9;
      EXPECT_NEAR(static_cast<double>(counts[token]) / kDraws, share, allowed) << token;
    }
  }
}

TEST(Sampling, GreedyTakesTheLowestOfEqualIds) {
  for (const std::size_t vocab : {std::size_t{1}, std::size_t{16}, std::size_t{255},
                                  std::size_t{256}, std::size_t{257}, std::size_t{5000}}) {
    std::vector<float> row(vocab, -7.0F);
    const SamplingParams greedy{.temperature = 0.0};
    EXPECT_EQ(sample(row, greedy, 0).token, 0);
    row.back() = -6.0F;
    EXPECT_EQ(sample(row, greedy, 0).token, static_cast<std::int64_t>(vocab) - 1);
    row[vocab / 2] = -6.0F;
    EXPECT_EQ(sample(row, greedy, 0).token, static_cast<std::int64_t>(vocab / 2));
    EXPECT_EQ(sample(row, greedy, 0).peak, -6.0F);
  }
}

TEST(Sampling, RowsThatAreNotNumbersHaveNoToken) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::size_t place : {std::size_t{0}, std::size_t{15}, std::size_t{300}}) {
    std::vector<float> row(301, 1.0F);
    row[place] = infinity;
    EXPECT_EQ(sample(row, {}, 0).token, -1);
    EXPECT_EQ(sample(row, {}, 0).peak, infinity);
    row[place] = -nan;
    EXPECT_EQ(sample(row, {}, 0).token, -1);
    EXPECT_TRUE(std::isnan(sample(row, {}, 0).peak));
  }
  const std::vector<float> forbidden(20, -infinity);
  EXPECT_EQ(sample(forbidden, {}, 0).token, -1);
}

TEST(Sampling, TopPOfNothingLeavesTheBest) {
  const std::vector<float> row = random_row(3000, 1.0F, 4);
  const auto best = std::max_element(row.begin(), row.end()) - row.begin();
  for (std::uint64_t draw = 0; draw < 20; ++draw) {
    EXPECT_EQ(sample(row, {.top_p = 0.0}, draw).token, best);
    EXPECT_EQ(sample(row, {.min_p = 1.0}, draw).token, best);
    EXPECT_EQ(sample(row, {.top_k = 1}, draw).token, best);
  }
}

TEST(Sampling, RowsOverWorkersAreTheRowsAlone) {
  constexpr std::size_t kRows = 37;
  constexpr std::size_t kVocab = 1000;
  const std::vector<float> logits = random_row(kRows * kVocab, 3.0F, 9);
  std::vector<SamplingParams> params(kRows);
  for (std::size_t row = 0; row < kRows; ++row) {
    params[row] = {.temperature = 0.1 * static_cast<double>(row % 12),
                   .top_k = static_cast<std::int64_t>(row % 5) * 20,
                   .top_p = row % 3 == 0 ? 1.0 : 0.9,
                   .min_p = row % 2 == 0 ? 0.0 : 0.01,
                   .seed = row,
                   .draw_index = row * 3};
  }
  WorkerPool pool({0, 0, 0}, std::chrono::microseconds(50));
  std::vector<SamplingScratch> scratch(static_cast<std::size_t>(pool.workers_count()));
  std::vector<std::int32_t> token_ids(kRows);
  std::vector<float> peaks(kRows);
  sample_rows(pool,
              {.logits = logits.data(),
               .params = params.data(),
               .token_ids = token_ids.data(),
               .peaks = peaks.data(),
               .rows = kRows,
               .vocab = kVocab},
              scratch);
  for (std::size_t row = 0; row < kRows; ++row) {
    const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(row * kVocab);
    const std::vector<float> alone(begin, begin + kVocab);
    const SampleResult expected = sample(alone, params[row], params[row].draw_index);
    EXPECT_EQ(token_ids[row], expected.token) << row;
    EXPECT_EQ(peaks[row], expected.peak) << row;
  }
}

}  // namespace
