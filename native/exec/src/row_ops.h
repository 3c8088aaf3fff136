// Operations on rows of activations around the products: positions, residuals, norms of heads, and
// the router. Plain functions over rows [begin, end), so that a caller can spread them over
// workers; a row's result depends on that row only, bit for bit.
#pragma once
#include <cstddef>
#include <cstdint>

#include "bf16.h"

namespace freetoken::exec {

// One tile of router logits: some tokens times some blocks of 16 experts.
struct RouterTile {
  const float* weights;  // of the first block, see pack_router
  std::size_t blocks, hidden;
  const Bf16* x;  // [tokens][hidden]
  std::size_t tokens;
  float* logits;  // of the first token and block
  std::size_t logits_stride;
};

// What rows need from an instruction set. Counts are multiples of 16.
struct RowKernels {
  // x = bf16(x / sqrt(mean(x^2) + eps) * weight), in place.
  void (*head_norm)(float* x, const float* weight, std::size_t size, float eps);
  // One fp32 accumulator per (expert, token) takes the columns in order.
  void (*router_logits)(const RouterTile& tile);
  // In place, fp32. Sixteen running sums, then a fixed tree.
  void (*softmax)(float* values, std::size_t count);
  void (*sigmoid)(float* values, std::size_t count);
};

struct RopeCall {
  float* x;  // row t starts at t * row_stride; its heads are consecutive
  std::size_t row_stride, heads, head_size;
  std::size_t rotary_size;        // even, at most head_size: the rest of a head stays as it is
  const float* rotations;         // [positions][2][rotary_size / 2]: cosines, then sines
  const std::int32_t* positions;  // [rows]
};

// Turns pair (i, i + rotary_size / 2) of every head by its row's angle: separate products, one sum.
void rope_rows(const RopeCall& call, std::size_t begin, std::size_t end);

// total += addend; both [rows][size].
void add_rows(float* total, const float* addend, std::size_t size, std::size_t begin,
              std::size_t end);

struct HeadNormCall {
  float* x;  // row t starts at t * row_stride; its heads are consecutive
  std::size_t row_stride, heads, head_size;
  const float* weight;  // [head_size]
  float eps;
};

// Root mean square norm of every head, rounded to bf16, in place.
void head_norm_rows(const RowKernels& kernels, const HeadNormCall& call, std::size_t begin,
                    std::size_t end);

enum class Scoring : std::uint8_t {
  kSoftmax,          // softmax over all experts
  kSoftmaxOfChosen,  // the best logits are chosen, then softmax over those (gpt-oss)
  kSigmoid,          // DeepSeek-V3
  kSqrtSoftplus,     // sqrt(ln(1 + e^x)), DeepSeek-V4
};

constexpr std::size_t kMaxExperts = 1024;
constexpr std::size_t kMaxTopK = 64;
constexpr std::size_t kExpertsPerBlock = 16;

// How logits become experts and weights. Everything is fp32.
struct Router {
  Scoring scoring = Scoring::kSoftmax;
  std::size_t experts = 0;
  std::size_t top_k = 0;
  bool renormalise = false;  // to a sum of 1; not for kSoftmaxOfChosen, whose sum is 1
  float routed_scale = 1.0F;
  // Group-limited choice: only the `kept_groups` best of `groups` equal parts of the experts stay
  // in, by the sum of the two best of each.
  std::size_t groups = 1;
  std::size_t kept_groups = 1;
  const float* logit_bias = nullptr;      // [experts], added to the logits
  const float* selection_bias = nullptr;  // [experts], added to the scores for the choice only
};

// Throws std::invalid_argument where the numbers do not fit together.
void validate(const Router& router);

// Router weights in blocks of 16 experts, [block][hidden][16], the last one padded with zeros.
std::size_t packed_router_floats(std::size_t experts, std::size_t hidden);
// weights: [experts][hidden].
void pack_router(const float* weights, std::size_t experts, std::size_t hidden, float* packed);

struct RouteCall {
  const Router* router;  // valid
  const float* packed;   // by pack_router
  const Bf16* x;         // [rows][hidden]
  std::size_t hidden;
  float* logits;             // [rows][experts rounded up to 16], working memory
  std::int32_t* expert_ids;  // [rows][top_k], best first, equals by the lower id
  float* weights;            // [rows][top_k]
};

// The logits of blocks [first_block, last_block) of experts.
void router_logits_rows(const RowKernels& kernels, const RouteCall& call, std::size_t first_block,
                        std::size_t last_block, std::size_t begin, std::size_t end);
// Experts and weights from complete logits.
void select_rows(const RowKernels& kernels, const RouteCall& call, std::size_t begin,
                 std::size_t end);
// Both.
void route_rows(const RowKernels& kernels, const RouteCall& call, std::size_t begin,
                std::size_t end);

}  // namespace freetoken::exec
