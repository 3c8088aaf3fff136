// Every weight format on every instruction set: a token's products have the same bits alone and
// among others, for all numbers of tokens that kernels treat differently and for sizes that end
// within a super-group, a chunk or a step.
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "emulated_kernels.h"
#include "executor.h"
#include "random_matrix.h"
#include "support.h"

namespace freetoken::exec::test {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kMostTokens = 70;
constexpr std::size_t kRows = 19;  // of which the last block has three

class Batches : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  Executor one_{{0}, 50us, kernels_named(std::get<0>(GetParam()))};
  WeightFormat format_ = parse_weight_format(std::get<1>(GetParam()));

  // One group, some super-groups with a shorter last one, and more than the 256 columns that are
  // decoded at a time.
  std::vector<std::size_t> columns() const {
    const std::size_t multiple = format_.column_multiple();
    if (multiple == 1) return {1, 5, 127, 130, 261, 397};
    if (multiple == kSuperBlockColumns) return {256, 768};
    return {multiple, 3 * multiple, round_up(256, multiple) + multiple,
            round_up(512, multiple) + 3 * multiple};
  }

  // Batches of `batches` tokens against each token alone, bit by bit.
  void compare(std::size_t columns, const std::vector<std::size_t>& batches) {
    Random random(17 + columns);
    RandomMatrix matrix(format_, kRows, columns, random);
    Guarded<Bf16> x(kMostTokens * columns);
    random.fill_bf16(x);
    for (const bool fast : {false, true}) {
      if (fast && !one_.has_fast(format_)) continue;
      std::vector<float> alone;
      for (std::size_t token = 0; token < kMostTokens; ++token) {
        const auto y = run(matrix, x.data() + token * columns, columns, 1, fast);
        alone.insert(alone.end(), y.begin(), y.end());
      }
      for (const std::size_t tokens : batches) {
        const auto together = run(matrix, x.data(), columns, tokens, fast);
        EXPECT_EQ(std::memcmp(together.data(), alone.data(), together.size() * sizeof(float)), 0)
            << tokens << " tokens, " << columns << " columns, fast: " << fast;
      }
    }
  }

 private:
  std::vector<float> run(RandomMatrix& matrix, const Bf16* x, std::size_t columns,
                         std::size_t tokens, bool fast) {
    return run_linear(one_, matrix, format_, x, {.tokens = tokens, .in = columns, .out = kRows},
                      fast);
  }
};

TEST_P(Batches, HaveTheBitsOfEachTokenAlone) {
  for (const std::size_t each : columns()) {
    compare(each, {2, 3, 4, 5, 6, 7, 15, 31, 32, 47, 48, 49, 50, 64, 70});
  }
}

TEST_P(Batches, OfAnySizeHaveTheBitsOfEachTokenAlone) {
  std::vector<std::size_t> all;
  for (std::size_t tokens = 1; tokens <= kMostTokens; ++tokens) all.push_back(tokens);
  compare(columns()[columns().size() / 2], all);
}

INSTANTIATE_TEST_SUITE_P(Executor, Batches,
                         testing::Combine(testing::ValuesIn(tested_isas()),
                                          testing::ValuesIn(kFormats)),
                         [](const auto& each) {
                           return std::get<0>(each.param) + "_" + std::get<1>(each.param);
                         });

}  // namespace
}  // namespace freetoken::exec::test
