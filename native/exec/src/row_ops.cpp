#include "row_ops.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "layout.h"
#include "validate.h"

namespace freetoken::exec {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
// What the families with independent scores add to a sum before they divide by it.
constexpr float kSumFloor = 1e-20F;

// The k best of values, best first, equals by the lower id. NaN is never better than anything, so
// ids are always distinct and in range.
void best_of(const float* values, std::size_t count, std::size_t k, std::int32_t* ids) {
  float best[kMaxTopK];
  for (std::size_t id = 0; id < count; ++id) {
    const float value = values[id];
    if (id >= k && !(value > best[k - 1])) continue;
    std::size_t place = std::min(id, k - 1);
    for (; place > 0 && value > best[place - 1]; --place) {
      best[place] = best[place - 1];
      ids[place] = ids[place - 1];
    }
    best[place] = value;
    ids[place] = static_cast<std::int32_t>(id);
  }
}

float sqrt_softplus(float x) {
  // ln(1 + e^x) without overflow; in fp64, so that rounding happens once.
  const double wide = x;
  return static_cast<float>(std::sqrt(std::max(wide, 0.0) + std::log1p(std::exp(-std::abs(wide)))));
}

// Logits become scores, in place. kSoftmaxOfChosen chooses by the logits themselves.
void score(const RowKernels& kernels, const Router& router, float* values, std::size_t padded) {
  switch (router.scoring) {
    case Scoring::kSoftmax:
      kernels.softmax(values, padded);
      break;
    case Scoring::kSoftmaxOfChosen:
      break;
    case Scoring::kSigmoid:
      kernels.sigmoid(values, padded);
      break;
    case Scoring::kSqrtSoftplus:
      std::transform(values, values + router.experts, values, sqrt_softplus);
      break;
  }
}

// Takes the experts of all but the best groups out of the choice.
void keep_best_groups(const Router& router, float* choice) {
  const std::size_t size = router.experts / router.groups;
  float strength[kMaxExperts];
  for (std::size_t group = 0; group < router.groups; ++group) {
    std::int32_t two[2];
    const std::size_t count = std::min<std::size_t>(2, size);
    best_of(choice + group * size, size, count, two);
    strength[group] = choice[group * size + static_cast<std::size_t>(two[0])];
    if (count == 2) strength[group] += choice[group * size + static_cast<std::size_t>(two[1])];
  }
  std::int32_t kept[kMaxTopK];
  best_of(strength, router.groups, router.kept_groups, kept);
  for (std::size_t group = 0; group < router.groups; ++group) {
    if (std::find(kept, kept + router.kept_groups, static_cast<std::int32_t>(group)) ==
        kept + router.kept_groups) {
      std::fill_n(choice + group * size, size, kLowest);
    }
  }
}

// Weights in the order of the choice.
void weigh(const RowKernels& kernels, const Router& router, float* weights) {
  if (router.scoring == Scoring::kSoftmaxOfChosen) {
    float padded[kMaxTopK];
    const std::size_t count = round_up(router.top_k, kExpertsPerBlock);
    std::copy_n(weights, router.top_k, padded);
    std::fill(padded + router.top_k, padded + count, kLowest);
    kernels.softmax(padded, count);
    std::copy_n(padded, router.top_k, weights);
  } else if (router.renormalise) {
    float sum = 0.0F;
    for (std::size_t i = 0; i < router.top_k; ++i) sum += weights[i];
    if (router.scoring != Scoring::kSoftmax) sum += kSumFloor;
    for (std::size_t i = 0; i < router.top_k; ++i) weights[i] /= sum;
  }
  for (std::size_t i = 0; i < router.top_k; ++i) weights[i] *= router.routed_scale;
}

void select(const RowKernels& kernels, const Router& router, const float* logits,
            std::int32_t* expert_ids, float* weights) {
  const std::size_t padded = round_up(router.experts, kExpertsPerBlock);
  float scores[kMaxExperts];
  float biased[kMaxExperts];
  for (std::size_t i = 0; i < router.experts; ++i) {
    scores[i] = router.logit_bias != nullptr ? logits[i] + router.logit_bias[i] : logits[i];
  }
  std::fill(scores + router.experts, scores + padded, kLowest);
  score(kernels, router, scores, padded);
  const float* choice = scores;
  if (router.selection_bias != nullptr || router.kept_groups < router.groups) {
    for (std::size_t i = 0; i < router.experts; ++i) {
      biased[i] =
          router.selection_bias != nullptr ? scores[i] + router.selection_bias[i] : scores[i];
    }
    if (router.kept_groups < router.groups) keep_best_groups(router, biased);
    choice = biased;
  }
  best_of(choice, router.experts, router.top_k, expert_ids);
  for (std::size_t i = 0; i < router.top_k; ++i) {
    weights[i] = scores[static_cast<std::size_t>(expert_ids[i])];
  }
  weigh(kernels, router, weights);
}

}  // namespace

void rope_rows(const RopeCall& call, std::size_t begin, std::size_t end) {
  const std::size_t half = call.rotary_size / 2;
  for (std::size_t row = begin; row < end; ++row) {
    const auto position = static_cast<std::size_t>(call.positions[row]);
    const float* cosines = call.rotations + position * call.rotary_size;
    const float* sines = cosines + half;
    for (std::size_t head = 0; head < call.heads; ++head) {
      float* __restrict first = call.x + row * call.row_stride + head * call.head_size;
      float* __restrict second = first + half;
      for (std::size_t i = 0; i < half; ++i) {
        const float a = first[i];
        const float b = second[i];
        first[i] = a * cosines[i] - b * sines[i];
        second[i] = b * cosines[i] + a * sines[i];
      }
    }
  }
}

void add_rows(float* total, const float* addend, std::size_t size, std::size_t begin,
              std::size_t end) {
  for (std::size_t i = begin * size; i < end * size; ++i) total[i] += addend[i];
}

void head_norm_rows(const RowKernels& kernels, const HeadNormCall& call, std::size_t begin,
                    std::size_t end) {
  for (std::size_t row = begin; row < end; ++row) {
    for (std::size_t head = 0; head < call.heads; ++head) {
      kernels.head_norm(call.x + row * call.row_stride + head * call.head_size, call.weight,
                        call.head_size, call.eps);
    }
  }
}

void validate(const Router& router) {
  require(router.experts > 0 && router.experts <= kMaxExperts,
          "router: the number of experts must be positive and at most 1024");
  require(router.top_k > 0 && router.top_k <= kMaxTopK,
          "router: top_k must be positive and at most 64");
  require(router.groups > 0 && router.experts % router.groups == 0,
          "router: the experts must divide into equal groups");
  require(router.kept_groups > 0 && router.kept_groups <= std::min(router.groups, kMaxTopK),
          "router: the number of kept groups must be positive and at most that of groups and 64");
  require(router.top_k <= router.experts / router.groups * router.kept_groups,
          "router: top_k is above the number of experts in the kept groups");
}

std::size_t packed_router_floats(std::size_t experts, std::size_t hidden) {
  return round_up(experts, kExpertsPerBlock) * hidden;
}

void pack_router(const float* weights, std::size_t experts, std::size_t hidden, float* packed) {
  for (std::size_t first = 0; first < experts; first += kExpertsPerBlock) {
    for (std::size_t column = 0; column < hidden; ++column) {
      for (std::size_t lane = 0; lane < kExpertsPerBlock; ++lane) {
        const std::size_t expert = first + lane;
        *packed++ = expert < experts ? weights[expert * hidden + column] : 0.0F;
      }
    }
  }
}

void router_logits_rows(const RowKernels& kernels, const RouteCall& call, std::size_t first_block,
                        std::size_t last_block, std::size_t begin, std::size_t end) {
  const std::size_t stride = round_up(call.router->experts, kExpertsPerBlock);
  kernels.router_logits({.weights = call.packed + first_block * kExpertsPerBlock * call.hidden,
                         .blocks = last_block - first_block,
                         .hidden = call.hidden,
                         .x = call.x + begin * call.hidden,
                         .tokens = end - begin,
                         .logits = call.logits + begin * stride + first_block * kExpertsPerBlock,
                         .logits_stride = stride});
}

void select_rows(const RowKernels& kernels, const RouteCall& call, std::size_t begin,
                 std::size_t end) {
  const std::size_t stride = round_up(call.router->experts, kExpertsPerBlock);
  const std::size_t top_k = call.router->top_k;
  for (std::size_t row = begin; row < end; ++row) {
    select(kernels, *call.router, call.logits + row * stride, call.expert_ids + row * top_k,
           call.weights + row * top_k);
  }
}

void route_rows(const RowKernels& kernels, const RouteCall& call, std::size_t begin,
                std::size_t end) {
  const std::size_t blocks = ceil_div(call.router->experts, kExpertsPerBlock);
  router_logits_rows(kernels, call, 0, blocks, begin, end);
  select_rows(kernels, call, begin, end);
}

}  // namespace freetoken::exec
