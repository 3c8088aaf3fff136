// Every weight format on every instruction set against double precision.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "emulated_kernels.h"
#include "executor.h"
#include "random_matrix.h"
#include "support.h"

namespace freetoken::exec::test {
namespace {

using namespace std::chrono_literals;

double relative_error(const float* ours, const std::vector<double>& reference) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    error += std::pow(reference[i] - ours[i], 2);
    norm += reference[i] * reference[i];
  }
  return std::sqrt(error / norm);
}

class Formats : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  const Kernels* kernels() const { return kernels_named(std::get<0>(GetParam())); }
  WeightFormat format() const { return parse_weight_format(std::get<1>(GetParam())); }
  // 5 groups of the widest kind, and an odd number where the format allows one.
  std::size_t columns() const {
    switch (format().column_multiple()) {
      case 1:
        return 397;
      case 16:
        return 656;
      case 256:
        return 768;
      default:
        return 640;
    }
  }
};

TEST_P(Formats, NameIsKept) { EXPECT_EQ(format().name(), std::get<1>(GetParam())); }

TEST_P(Formats, ProductsAreThoseOfDoublePrecision) {
  Random random(3);
  Executor executor({0, 1}, 50us, kernels());
  for (const std::size_t tokens : {1U, 2U, 3U, 5U, 8U, 21U, 64U}) {
    const Linear sizes{.tokens = tokens, .in = columns(), .out = 75};
    RandomMatrix matrix(format(), sizes.out, sizes.in, random);
    Guarded<Bf16> x(tokens * sizes.in);
    random.fill_bf16(x);
    const std::vector<double> w = matrix.values();
    std::vector<double> reference(tokens * sizes.out);
    for (std::size_t token = 0; token < tokens; ++token) {
      for (std::size_t row = 0; row < sizes.out; ++row) {
        double& sum = reference[token * sizes.out + row];
        for (std::size_t i = 0; i < sizes.in; ++i) {
          sum += double{bf16_to_float(x[token * sizes.in + i])} * w[row * sizes.in + i];
        }
      }
    }
    const auto exact = run_linear(executor, matrix, format(), x.data(), sizes, false);
    EXPECT_LE(relative_error(exact.data(), reference), 2e-6) << tokens << " tokens";
    // Activations in [-1, 1) with 127 steps per 32 columns: about 0.3 % each, random signs.
    const auto fast = run_linear(executor, matrix, format(), x.data(), sizes, true);
    EXPECT_LE(relative_error(fast.data(), reference), 1.3e-2) << tokens << " tokens, fast";
  }
}

TEST_P(Formats, RowsDoNotDependOnTheBatchOrThreads) {
  Random random(5);
  Executor one({0}, 50us, kernels());
  Executor many({0, 1, 0, 1}, 20us, kernels());
  const Linear all{.tokens = 23, .in = columns(), .out = 200};
  RandomMatrix matrix(format(), all.out, all.in, random);
  Guarded<Bf16> x(all.tokens * all.in);
  random.fill_bf16(x);
  for (const bool fast : {false, true}) {
    const auto together = run_linear(many, matrix, format(), x.data(), all, fast);
    for (const std::size_t tokens : {1U, 2U, 4U, 7U}) {
      const Linear few{.tokens = tokens, .in = all.in, .out = all.out};
      const auto alone = run_linear(one, matrix, format(), x.data() + 3 * all.in, few, fast);
      const auto from = together.begin() + static_cast<std::ptrdiff_t>(3 * all.out);
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), from)) << tokens << " tokens " << fast;
    }
  }
}

// A NaN among the activations is not hidden by rounding to eight bits, whatever its neighbours.
TEST_P(Formats, NotANumberStays) {
  Random random(11);
  Executor executor({0}, 50us, kernels());
  const Linear sizes{.tokens = 2, .in = columns(), .out = 32};
  RandomMatrix matrix(format(), sizes.out, sizes.in, random);
  for (const std::size_t place : {std::size_t{0}, std::size_t{17}, sizes.in - 1}) {
    Guarded<Bf16> x(sizes.tokens * sizes.in);
    random.fill_bf16(x);
    x[place] = 0x7fc0;
    for (const bool fast : {false, true}) {
      const auto y = run_linear(executor, matrix, format(), x.data(), sizes, fast);
      for (std::size_t row = 0; row < sizes.out; ++row) {
        EXPECT_TRUE(std::isnan(y[row])) << place << " " << fast;
        EXPECT_FALSE(std::isnan(y[sizes.out + row])) << place << " " << fast;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Executor, Formats,
                         testing::Combine(testing::ValuesIn(tested_isas()),
                                          testing::ValuesIn(kFormats)),
                         [](const auto& each) {
                           return std::get<0>(each.param) + "_" + std::get<1>(each.param);
                         });

double activated(const GluSpec& spec, double gate, double up) {
  if (spec.limit > 0) {
    gate = std::min(gate, double{spec.limit});
    up = std::clamp(up, -double{spec.limit}, double{spec.limit});
  }
  switch (spec.activation) {
    case Activation::kSilu:
      return gate / (1 + std::exp(-gate)) * up;
    case Activation::kGelu:
      return gate * 0.5 * (1 + std::erf(gate / std::sqrt(2.0))) * up;
    case Activation::kGeluTanh:
      return gate * 0.5 *
             (1 + std::tanh(std::sqrt(2.0 / M_PI) * (gate + 0.044715 * gate * gate * gate))) * up;
    case Activation::kSwigluOai:
      return (up + 1) * gate / (1 + std::exp(-double{spec.alpha} * gate));
  }
  return NAN;
}

// What `fast` makes of activations: 127 steps per 32 columns each way.
void round_to_int8(std::vector<double>& values) {
  for (std::size_t first = 0; first < values.size(); first += 32) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end =
        begin + static_cast<std::ptrdiff_t>(std::min<std::size_t>(32, values.size() - first));
    double largest = 0;
    for (auto each = begin; each != end; ++each) largest = std::max(largest, std::abs(*each));
    const double step = largest / 127;
    for (auto each = begin; each != end && step > 0; ++each) {
      *each = std::nearbyint(*each / step) * step;
    }
  }
}

// One expert record of random weights, globals and biases.
struct RandomExpert {
  RandomExpert(const WeightFormat& weight_format, std::size_t hidden_size, std::size_t inner_size,
               bool biased, Random& random)
      : format(weight_format),
        hidden(hidden_size),
        inner(inner_size),
        layout(expert_layout(weight_format, hidden, inner, biased)),
        bytes(round_up(layout.bytes, 4096)) {
    auto* data = reinterpret_cast<std::uint8_t*>(bytes.data());
    RandomMatrix::fill(format, hidden, 2 * inner / 16, data, random);
    RandomMatrix::fill(format, inner, hidden / 16, data + layout.down_offset, random);
    if (layout.globals_offset != 0) {
      const float globals[3] = {0.5F, 0.25F, 2.0F};
      std::memcpy(data + layout.globals_offset, globals, sizeof globals);
    }
    const std::pair<std::size_t, std::size_t> biases[] = {{layout.gate_bias_offset, inner},
                                                          {layout.up_bias_offset, inner},
                                                          {layout.down_bias_offset, hidden}};
    for (const auto& [offset, count] : biases) {
      for (std::size_t i = 0; offset != 0 && i < count; ++i) {
        const float bias = 0.3F * random.next();
        std::memcpy(data + offset + i * sizeof bias, &bias, sizeof bias);
      }
    }
  }

  float number(std::size_t offset, std::size_t index, float otherwise) {
    if (offset == 0) return otherwise;
    float value = 0;
    std::memcpy(&value, bytes.data() + offset + index * sizeof value, sizeof value);
    return value;
  }

  std::vector<double> run(const GluSpec& spec, const Bf16* words, bool fast) {
    std::vector<double> x(hidden);
    for (std::size_t c = 0; c < hidden; ++c) x[c] = bf16_to_float(words[c]);
    if (fast) round_to_int8(x);
    const auto gate_up = RandomMatrix::values_of(format, bytes.data(), 2 * inner / 16, hidden);
    const auto down =
        RandomMatrix::values_of(format, bytes.data() + layout.down_offset, hidden / 16, inner);
    std::vector<double> middle(inner);
    for (std::size_t i = 0; i < inner; ++i) {
      double sums[2] = {};
      for (std::size_t part = 0; part < 2; ++part) {
        const std::size_t row = (i / 16 * 2 + part) * 16 + i % 16;
        for (std::size_t c = 0; c < hidden; ++c) {
          sums[part] += gate_up[row * hidden + c] * x[c];
        }
      }
      const double gate =
          sums[0] * number(layout.globals_offset, 0, 1) + number(layout.gate_bias_offset, i, 0);
      const double up =
          sums[1] * number(layout.globals_offset, 1, 1) + number(layout.up_bias_offset, i, 0);
      middle[i] = bf16_to_float(float_to_bf16(static_cast<float>(activated(spec, gate, up))));
    }
    if (fast) round_to_int8(middle);
    std::vector<double> y(hidden);
    for (std::size_t row = 0; row < hidden; ++row) {
      for (std::size_t c = 0; c < inner; ++c) y[row] += down[row * inner + c] * middle[c];
      y[row] =
          y[row] * number(layout.globals_offset, 2, 1) + number(layout.down_bias_offset, row, 0);
    }
    return y;
  }

  WeightFormat format;
  std::size_t hidden, inner;
  ExpertLayout layout;
  Guarded<std::byte> bytes;
};

// One token through one expert, against double precision.
void check_expert(Executor& executor, RandomExpert& expert, const GluSpec& spec, bool fast,
                  Random& random) {
  Guarded<Bf16> x(expert.hidden);
  random.fill_bf16(x);
  const std::int32_t id = 0;
  const float weight = 0.75F;
  Guarded<float> y(expert.hidden);
  executor.experts({.x = x.data(),
                    .expert_ids = &id,
                    .weights = &weight,
                    .y = y.data(),
                    .tokens = 1,
                    .top_k = 1,
                    .hidden = expert.hidden,
                    .intermediate = expert.inner,
                    .bank = expert.bytes.data(),
                    .record_bytes = expert.bytes.size(),
                    .experts_count = 1,
                    .format = expert.format,
                    .has_bias = expert.layout.gate_bias_offset != 0,
                    .glu = spec,
                    .fast = fast});
  const bool rounds = fast && executor.has_fast(expert.format);
  std::vector<double> reference = expert.run(spec, x.data(), rounds);
  for (double& value : reference) value *= weight;
  // What goes into the last matrix is rounded to bf16 in both: a number next to the border between
  // two of them may go to the other, by 2^-8. Fast: or to the next step.
  EXPECT_LE(relative_error(y.data(), reference), rounds ? 1.5e-2 : 3e-3)
      << static_cast<int>(spec.activation) << " " << spec.limit << " " << fast;
}

constexpr Activation kActivations[] = {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
                                       Activation::kSwigluOai};

TEST_P(Formats, ExpertsWithBiasesAndEveryActivation) {
  Random random(9);
  Executor executor({0, 1}, 50us, kernels());
  for (const Activation activation : kActivations) {
    for (const float limit : {0.0F, 0.4F}) {
      RandomExpert expert(format(), 256, 256, activation == Activation::kSwigluOai, random);
      const GluSpec spec{.activation = activation, .limit = limit};
      for (const bool fast : {false, true}) check_expert(executor, expert, spec, fast, random);
    }
  }
}

// What machines without an instruction set have of it at the size of a real model.
TEST_P(Formats, ExpertsOfARealSize) {
  Random random(13);
  Executor executor({0, 1}, 50us, kernels());
  RandomExpert expert(format(), 2048, 768, true, random);
  const std::size_t turn = std::hash<std::string>{}(std::get<1>(GetParam())) % 4;
  const GluSpec spec{.activation = kActivations[turn], .limit = 7.0F};
  for (const bool fast : {false, true}) check_expert(executor, expert, spec, fast, random);
}

}  // namespace
}  // namespace freetoken::exec::test
