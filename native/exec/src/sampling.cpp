#include "sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "philox.h"

namespace freetoken::exec {
namespace {

// Logits per maximum: few enough blocks to look through, and the k-th best of the maxima is a
// bound for top_k as long as k is at most the number of blocks.
constexpr std::size_t kPeakBlock = 256;
// Weights per partial sum of a draw.
constexpr std::size_t kDrawBlock = 512;
// Beyond these a temperature is greedy or uniform anyway, and fp32 could not hold it.
constexpr double kColdest = 1e-30;
constexpr double kHottest = 1e30;
constexpr float kLowest = -std::numeric_limits<float>::infinity();
// Weights are at most 1, so their bits are below 2^30: three digits of ten bits.
constexpr unsigned kDigitBits = 10;
constexpr std::size_t kDigits = std::size_t{1} << kDigitBits;

constexpr std::size_t blocks_of(std::size_t count, std::size_t block) {
  return (count + block - 1) / block;
}

// Four lanes: what every 64-bit machine has, so that one compilation serves all of them.
using Floats = float __attribute__((vector_size(16)));
using Masks = std::int32_t __attribute__((vector_size(16)));
constexpr std::size_t kLanes = sizeof(Floats) / sizeof(float);

inline Floats load(const float* x) {
  Floats lanes;
  std::memcpy(&lanes, x, sizeof(lanes));
  return lanes;
}

// The largest value that is a number, or -inf; `nan` becomes non-zero if any is NaN.
float maximum(const float* x, std::size_t count, std::int32_t& nan) {
  constexpr std::size_t kChains = 4;  // so that no comparison waits for the one before it
  Floats best[kChains];
  Masks odd[kChains] = {};
  for (Floats& chain : best) chain = kLowest - Floats{};
  std::size_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
#pragma GCC unroll 4
    for (std::size_t chain = 0; chain < kChains; ++chain) {
      const Floats value = load(x + i + chain * kLanes);
      best[chain] = value > best[chain] ? value : best[chain];
      odd[chain] |= value != value;
    }
  }
  float most = kLowest;
  for (; i < count; ++i) {
    most = x[i] > most ? x[i] : most;
    nan |= std::isnan(x[i]) ? 1 : 0;
  }
  for (std::size_t lane = 0; lane < kChains * kLanes; ++lane) {
    const float value = best[lane / kLanes][lane % kLanes];
    most = value > most ? value : most;
    nan |= odd[lane / kLanes][lane % kLanes];
  }
  return most;
}

// e^x for x <= 0 with a relative error below 3e-7, exactly 1 at 0 and exactly 0 below -87, where
// singles end. Products and sums are rounded one by one: the same bits on every machine.
inline Floats exponential(Floats x) {
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr float kLeast = -87.0F;
  const Masks kept = x >= kLeast;
  x = kept ? x : kLeast - Floats{};
  const Floats shifted = x * 1.44269504088896341F + kMagic;
  const Floats n = shifted - kMagic;
  // ln 2 in two parts; the product with the first one is exact.
  const Floats r = (x - n * 0.693359375F) + n * 2.12194440e-4F;
  Floats p = r * 1.9875691500e-4F + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = (p * (r * r) + r) + 1.0F;
  const Masks power = (std::bit_cast<Masks>(shifted) << 23) + 0x3f800000;
  return std::bit_cast<Floats>(std::bit_cast<Masks>(p * std::bit_cast<Floats>(power)) & kept);
}

// Element i goes to running sum i % 8 in fp64; the eight are added pairwise.
double sum_of(const float* weights, std::size_t count) {
  constexpr std::size_t kSums = 8;
  double sums[kSums] = {};
  std::size_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (std::size_t k = 0; k < kSums; ++k) {
      sums[k] += static_cast<double>(weights[i + k]);
    }
  }
  for (std::size_t k = 0; i < count; ++i, ++k) {
    sums[k] += static_cast<double>(weights[i]);
  }
  for (std::size_t width = kSums / 2; width > 0; width /= 2) {
    for (std::size_t k = 0; k < width; ++k) sums[k] += sums[k + width];
  }
  return sums[0];
}

// A number in [0, 1) of 53 bits.
double uniform(std::uint64_t seed, std::uint64_t draw_index) {
  return static_cast<double>(philox_draw(seed, draw_index) >> 11) * 0x1p-53;
}

}  // namespace

void SamplingScratch::reserve(std::size_t vocab) {
  if (weights_.size() >= vocab) return;
  ids_.resize(vocab);
  maxima_.resize(2 * blocks_of(vocab, kPeakBlock));
  sums_.resize(std::max(kDigits, blocks_of(vocab, kDrawBlock)));
  weights_.resize(vocab);
}

// One row on its way from logits to a token: the tokens still in it, ascending, and their
// probabilities relative to the best (fp32 is enough for weights that are summed in fp64).
class RowSampler {
 public:
  RowSampler(const float* logits, std::size_t vocab, SamplingScratch& scratch)
      : logits_(logits),
        vocab_(vocab),
        weights_(scratch.weights_.data()),
        ids_(scratch.ids_.data()),
        maxima_(scratch.maxima_.data()),
        sums_(scratch.sums_.data()) {}

  // NaN if any logit is.
  float find_peak() {
    std::int32_t nan = 0;
    peak_ = kLowest;
    for (std::size_t block = 0; block * kPeakBlock < vocab_; ++block) {
      const std::size_t start = block * kPeakBlock;
      const float best = maximum(logits_ + start, std::min(kPeakBlock, vocab_ - start), nan);
      maxima_[block] = best;
      if (best > peak_) {
        peak_ = best;
        peak_block_ = block;
      }
    }
    return nan != 0 ? std::numeric_limits<float>::quiet_NaN() : peak_;
  }

  // The lowest id among equals.
  std::size_t greedy() const {
    std::size_t id = peak_block_ * kPeakBlock;
    while (logits_[id] < peak_) ++id;
    return id;
  }

  std::size_t sample(const SamplingParams& params, double drawn) {
    const bool best_k = params.top_k > 0 && static_cast<std::uint64_t>(params.top_k) < vocab_;
    if (best_k) keep_best(static_cast<std::size_t>(params.top_k));
    const auto temperature =
        static_cast<float>(std::min(std::max(params.temperature, kColdest), kHottest));
    weigh(best_k ? weights_ : logits_, best_k ? count_ : vocab_, temperature);
    if (params.top_p < 1.0) keep_nucleus(params.top_p);
    if (params.min_p > 0.0) {
      const auto least = static_cast<float>(std::min(params.min_p, 1.0));  // the best has weight 1
      keep([least](float weight) { return weight >= least; });
    }
    const std::size_t index = draw(drawn);
    return all_ ? index : ids_[index];
  }

 private:
  void weigh(const float* scores, std::size_t count, float temperature) {
    const auto weight = [peak = peak_, temperature](Floats score) {
      return exponential((score - peak) / temperature);
    };
    std::size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const Floats lanes = weight(load(scores + i));
      std::memcpy(weights_ + i, &lanes, sizeof(lanes));
    }
    for (; i < count; ++i) weights_[i] = weight(scores[i] + Floats{})[0];
    count_ = count;
  }

  // Keeps the tokens whose weight passes, in place and in order.
  template <class Passes>
  void keep(Passes passes) {
    std::size_t kept = 0;
    for (std::size_t i = 0; i < count_; ++i) {
      const float weight = weights_[i];
      const std::uint32_t id = all_ ? static_cast<std::uint32_t>(i) : ids_[i];
      weights_[kept] = weight;
      ids_[kept] = id;
      kept += passes(weight) ? 1U : 0U;
    }
    count_ = kept;
    all_ = false;
  }

  // The tokens that are at least the k-th best, their logits in `weights_`.
  void keep_best(std::size_t k) {
    const std::size_t blocks = blocks_of(vocab_, kPeakBlock);
    float bound = kLowest;
    if (k <= blocks) {
      float* order = maxima_ + blocks;
      std::copy_n(maxima_, blocks, order);
      bound = kth_largest(order, blocks, k);
    }
    gather(bound);
    gather(kth_largest(weights_, count_, k));
  }

  // Reorders the values.
  static float kth_largest(float* values, std::size_t count, std::size_t k) {
    std::nth_element(values, values + (k - 1), values + count, std::greater<>());
    return values[k - 1];
  }

  // The tokens with logits of at least `least`; blocks without any are not looked at.
  void gather(float least) {
    count_ = 0;
    all_ = false;
    for (std::size_t start = 0; start < vocab_; start += kPeakBlock) {
      if (maxima_[start / kPeakBlock] < least) continue;
      const std::size_t end = std::min(start + kPeakBlock, vocab_);
      for (std::size_t id = start; id < end; ++id) {
        weights_[count_] = logits_[id];
        ids_[count_] = static_cast<std::uint32_t>(id);
        count_ += logits_[id] >= least ? 1U : 0U;
      }
    }
  }

  // The smallest set of largest weights, the lower id first, that reaches top_p of the sum.
  void keep_nucleus(double top_p) {
    const double sum = sum_of(weights_, count_);
    // Never nothing: the best token belongs to every nucleus.
    const double goal = std::max(top_p * sum, std::numeric_limits<double>::min());
    // What is below the mean of the share left out adds up to less than that share, so the nucleus
    // is in the rest; the hair is for the rounding of the sums.
    const double mean = std::max(1.0 - top_p, 0.0) * sum / static_cast<double>(count_);
    const auto negligible = static_cast<float>(std::min(mean * (1.0 - 1e-6), 1.0));
    keep([negligible](float weight) { return weight >= negligible; });
    double total = 0.0;
    const std::uint32_t cut = nucleus_cut(goal, total);
    keep([&](float weight) {
      const auto bits = std::bit_cast<std::uint32_t>(weight);
      if (bits != cut) return bits > cut;
      if (total >= goal) return false;
      total += static_cast<double>(weight);
      return true;
    });
  }

  // The bits of the smallest weight in the nucleus, found digit by digit: non-negative floats are
  // ordered as their bits. `total`: the sum of the weights above it, which is below the goal. The
  // weights of one digit are added by ascending id, the digits' sums from the largest down.
  std::uint32_t nucleus_cut(double goal, double& total) {
    std::uint32_t prefix = 0;
    for (unsigned shift = 2 * kDigitBits;; shift -= kDigitBits) {
      std::fill_n(sums_, kDigits, 0.0);
      for (std::size_t i = 0; i < count_; ++i) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(weights_[i]) >> shift;
        if (bits >> kDigitBits == prefix) {
          sums_[bits % kDigits] += static_cast<double>(weights_[i]);
        }
      }
      prefix = prefix << kDigitBits | cut_digit(goal, total);
      if (shift == 0) return prefix;
    }
  }

  // The digit at which the sums from above reach the goal. Rounding may leave them a hair short of
  // it: then the lowest digit that occurs.
  std::uint32_t cut_digit(double goal, double& total) const {
    std::size_t cut = 0;
    double above = total;
    for (std::size_t digit = kDigits; digit-- > 0;) {
      if (!(sums_[digit] > 0.0)) continue;
      cut = digit;
      total = above;
      above += sums_[digit];
      if (above >= goal) break;
    }
    return static_cast<std::uint32_t>(cut);
  }

  // The index at which the running sum passes `drawn` of the whole sum: the sums of blocks are
  // added in order, then the weights of one block to the blocks before it.
  std::size_t draw(double drawn) {
    const std::size_t blocks = blocks_of(count_, kDrawBlock);
    double total = 0.0;
    for (std::size_t block = 0; block < blocks; ++block) {
      const std::size_t start = block * kDrawBlock;
      total += sum_of(weights_ + start, std::min(kDrawBlock, count_ - start));
      sums_[block] = total;
    }
    const double threshold = drawn * total;
    const double* passed = std::upper_bound(sums_, sums_ + blocks, threshold);
    const auto block = std::min(static_cast<std::size_t>(passed - sums_), blocks - 1);
    double running = block > 0 ? sums_[block - 1] : 0.0;
    const std::size_t end = std::min((block + 1) * kDrawBlock, count_);
    for (std::size_t i = block * kDrawBlock; i < end; ++i) {
      running += static_cast<double>(weights_[i]);
      if (running > threshold) return i;
    }
    // Rounding at the end of a block: its last weight that can be drawn.
    std::size_t last = end - 1;
    while (!(weights_[last] > 0.0F)) --last;
    return last;
  }

  const float* logits_;
  std::size_t vocab_;
  float* weights_;
  std::uint32_t* ids_;
  float* maxima_;  // [2][blocks]: the second half is for reordering
  double* sums_;
  float peak_ = kLowest;
  std::size_t peak_block_ = 0;
  std::size_t count_ = 0;
  bool all_ = true;  // every token is still in, and ids_ says nothing
};

SampleResult sample_row(const float* logits, std::size_t vocab, const SamplingParams& params,
                        SamplingScratch& scratch) {
  scratch.reserve(vocab);
  RowSampler row(logits, vocab, scratch);
  const float peak = row.find_peak();
  if (!std::isfinite(peak)) return {.token = -1, .peak = peak};
  const std::size_t token = params.temperature <= 0.0
                                ? row.greedy()
                                : row.sample(params, uniform(params.seed, params.draw_index));
  return {.token = static_cast<std::int32_t>(token), .peak = peak};
}

void sample_rows(WorkerPool& pool, const SampleRowsCall& call, std::span<SamplingScratch> scratch) {
  // Workers must not throw, so nothing may be left to allocate.
  for (SamplingScratch& one : scratch) one.reserve(call.vocab);
  pool.run(call.rows, [&](std::uint32_t row, int worker) noexcept {
    const SampleResult found =
        sample_row(call.logits + row * call.vocab, call.vocab, call.params[row],
                   scratch[static_cast<std::size_t>(worker)]);
    call.token_ids[row] = found.token;
    call.peaks[row] = found.peak;
  });
}

}  // namespace freetoken::exec
