// The executor without Python, small enough to run under the sanitizers in seconds.
#include "executor.h"

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulated_kernels.h"
#include "support.h"

namespace freetoken::exec::test {
namespace {

using namespace std::chrono_literals;

std::vector<float> run_linear(Executor& executor, std::size_t tokens, std::size_t in,
                              std::size_t out) {
  Random random(in + out);
  Guarded<Bf16> matrix(out * in);
  random.fill_bf16(matrix);
  Guarded<Bf16> packed(rows16_bytes(out, in) / sizeof(Bf16));
  pack_rows16(matrix.data(), out, in, packed.data());
  Guarded<Bf16> x(tokens * in);
  random.fill_bf16(x);
  Guarded<float> bias(out);
  random.fill(bias);
  Guarded<float> y(tokens * out);
  const LinearOutput output{.w = reinterpret_cast<const std::byte*>(packed.data()),
                            .format = {},
                            .bias = bias.data(),
                            .y = y.data(),
                            .out_features = out};
  executor.linear(
      {.x = x.data(), .tokens = tokens, .in_features = in, .outputs = {&output, 1}, .fast = false});
  double error = 0;
  double norm = 0;
  for (std::size_t token = 0; token < tokens; ++token) {
    for (std::size_t row = 0; row < out; ++row) {
      double sum = bias[row];
      for (std::size_t i = 0; i < in; ++i) {
        sum += double{bf16_to_float(x[token * in + i])} * bf16_to_float(matrix[row * in + i]);
      }
      error += std::pow(sum - y[token * out + row], 2);
      norm += sum * sum;
    }
  }
  EXPECT_LE(error, 1e-12 * norm) << executor.isa();
  return {y.data(), y.data() + y.size()};
}

std::vector<float> run_experts(Executor& executor, std::size_t tokens) {
  constexpr std::size_t kHidden = 50;
  constexpr std::size_t kIntermediate = 23;
  constexpr std::size_t kExperts = 5;
  constexpr std::size_t kTopK = 2;
  const std::size_t record =
      round_up(expert_layout({}, kHidden, kIntermediate, false).bytes, kWeightAlignment);
  Random random(7);
  Guarded<Bf16> bank(kExperts * record / sizeof(Bf16));
  random.fill_bf16(bank);
  Guarded<Bf16> x(tokens * kHidden);
  random.fill_bf16(x);
  Guarded<std::int32_t> ids(tokens * kTopK);
  Guarded<float> weights(tokens * kTopK);
  random.fill(weights);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ids[i] = i % 7 == 3 ? -1 : static_cast<std::int32_t>(i * 3 % kExperts);
  }
  Guarded<float> y(tokens * kTopK * kHidden);
  executor.experts({.x = x.data(),
                    .expert_ids = ids.data(),
                    .weights = weights.data(),
                    .y = y.data(),
                    .tokens = tokens,
                    .top_k = kTopK,
                    .hidden = kHidden,
                    .intermediate = kIntermediate,
                    .bank = reinterpret_cast<const std::byte*>(bank.data()),
                    .record_bytes = record,
                    .experts_count = kExperts,
                    .format = {},
                    .glu = {}});
  Guarded<float> merged(tokens * kHidden);
  executor.merge(y.data(), merged.data(), tokens, kTopK, kHidden);
  for (std::size_t i = 0; i < kHidden; ++i) {
    EXPECT_EQ(merged[i], y[i] + y[kHidden + i]) << "merge: not the sum in routed order";
  }
  return {y.data(), y.data() + y.size()};
}

std::vector<Bf16> run_attention(Executor& executor, std::size_t tokens, std::size_t head_size,
                                std::size_t queries) {
  constexpr std::size_t kPageTokens = 8;
  const std::size_t pages = ceil_div(tokens, kPageTokens);
  constexpr std::size_t kHeads = 2;
  Random random(11);
  Guarded<Bf16> k_pages(pages * kHeads * kPageTokens * head_size);
  Guarded<Bf16> v_pages(k_pages.size());
  Guarded<float> k(tokens * kHeads * head_size);
  Guarded<float> v(k.size());
  Guarded<float> q(queries * 3 * kHeads * head_size);
  random.fill(k);
  random.fill(v);
  random.fill(q);
  Guarded<std::int32_t> table(pages);
  Guarded<std::int32_t> sequence(tokens);
  Guarded<std::int32_t> positions(tokens);
  for (std::size_t i = 0; i < pages; ++i) table[i] = static_cast<std::int32_t>(pages - 1 - i);
  for (std::size_t i = 0; i < tokens; ++i) {
    sequence[i] = 0;
    positions[i] = static_cast<std::int32_t>(i);
  }
  executor.store_kv({.k = k.data(),
                     .v = v.data(),
                     .k_pages = k_pages.data(),
                     .v_pages = v_pages.data(),
                     .page_table = table.data(),
                     .sequence_index = sequence.data(),
                     .positions = positions.data(),
                     .tokens = tokens,
                     .kv_heads = kHeads,
                     .head_size = head_size,
                     .page_tokens = kPageTokens,
                     .max_pages = pages,
                     .sequences = 1,
                     .pages = pages});
  Guarded<Bf16> out(queries * 3 * kHeads * head_size);
  const std::size_t first = tokens - queries;
  executor.paged_attention({.q = q.data(),
                            .k_pages = k_pages.data(),
                            .v_pages = v_pages.data(),
                            .page_table = table.data(),
                            .sequence_index = sequence.data() + first,
                            .positions = positions.data() + first,
                            .out = out.data(),
                            .tokens = queries,
                            .q_heads = 3 * kHeads,
                            .kv_heads = kHeads,
                            .head_size = head_size,
                            .page_tokens = kPageTokens,
                            .max_pages = pages,
                            .sequences = 1,
                            .pages = pages,
                            .scale = 0.5F});
  // The first token sees itself only: its output is its own value.
  for (std::size_t i = 0; first == 0 && i < head_size; ++i) {
    EXPECT_EQ(out[i], float_to_bf16(v[i]));
  }
  return {out.data(), out.data() + out.size()};
}

class PerIsa : public testing::TestWithParam<std::string> {};

TEST_P(PerIsa, ResultsDoNotDependOnThreads) {
  Executor one({0}, 50us, kernels_named(GetParam()));
  Executor many({0, 1, 0, 1}, 20us, kernels_named(GetParam()));
  for (const std::size_t tokens : {1U, 2U, 7U, 30U}) {
    EXPECT_EQ(run_linear(one, tokens, 37, 50), run_linear(many, tokens, 37, 50));
    EXPECT_EQ(run_experts(one, tokens), run_experts(many, tokens));
  }
  EXPECT_EQ(run_linear(one, 3, 128, 512), run_linear(many, 3, 128, 512));
  for (const std::size_t head_size : {1U, 16U, 40U}) {
    EXPECT_EQ(run_attention(one, 21, head_size, 21), run_attention(many, 21, head_size, 21));
  }
  EXPECT_EQ(run_attention(one, 1100, 4, 2), run_attention(many, 1100, 4, 2)) << "in parts";
}

INSTANTIATE_TEST_SUITE_P(Executor, PerIsa, testing::ValuesIn(tested_isas()),
                         [](const auto& each) { return each.param; });

TEST(Executor, InstructionSetsAgree) {
  std::vector<float> expected;
  for (const std::string& isa : tested_isas()) {
    if (isa.ends_with("avx512_bf16") || isa.ends_with("amx")) continue;  // round in their own way
    Executor executor({0, 1}, 50us, kernels_named(isa));
    const std::vector<float> result = run_linear(executor, 5, 200, 40);
    if (expected.empty()) expected = result;
    EXPECT_EQ(result, expected) << isa;
  }
}

TEST(Executor, RefusesWrongArguments) {
  EXPECT_THROW(Executor({0}, 1us, "sse9"), std::invalid_argument);
  EXPECT_THROW(Executor({}, 1us, "auto"), std::invalid_argument);
  EXPECT_THROW(Executor({0, -1}, 1us, "auto"), std::invalid_argument);
  Executor executor({0, 1}, 1us, "auto");
  alignas(64) std::byte memory[256] = {};
  LinearOutput output{.w = memory + 8,
                      .format = {},
                      .bias = nullptr,
                      .y = reinterpret_cast<float*>(memory),
                      .out_features = 2};
  LinearCall call{.x = reinterpret_cast<const Bf16*>(memory),
                  .tokens = 1,
                  .in_features = 2,
                  .outputs = {&output, 1}};
  EXPECT_THROW(executor.linear(call), std::invalid_argument) << "unaligned weights";
  output.w = memory;
  output.format = parse_weight_format("mxfp4");
  EXPECT_THROW(executor.linear(call), std::invalid_argument) << "2 columns in groups of 32";
}

}  // namespace
}  // namespace freetoken::exec::test
