// Paged attention: (run of tokens, kv head) pairs, each cut into parts of whole pages. Parts have
// a fixed length and are merged in order, so the result depends neither on who computed them nor
// on the batch.
#include <algorithm>

#include "exclusive.h"
#include "executor.h"
#include "layout.h"
#include "validate.h"

namespace freetoken::exec {
namespace {

constexpr std::size_t kSplitTokens = 1024;
constexpr std::size_t kQueriesPerRun = 16;
constexpr std::size_t kPairsPerWorker = 4;

struct PartView {
  float* maximum;
  float* sum;
  float* output;
};

// A part in memory: maxima, sums, outputs.
PartView part_view(float* memory, std::size_t queries_max) {
  return {memory, memory + queries_max, memory + 2 * queries_max};
}

std::size_t padded(std::size_t value) { return round_up(value, 16); }

void plan_attention(const AttentionCall& call, AttentionPlan& plan) {
  const std::size_t group = call.q_heads / call.kv_heads;
  const std::size_t run_tokens = std::max<std::size_t>(1, kQueriesPerRun / group);
  const std::size_t pages = std::max<std::size_t>(1, kSplitTokens / call.page_tokens);
  plan.runs.clear();
  plan.parts_count = 0;
  plan.queries_max = run_tokens * group;
  plan.split_tokens = static_cast<std::int64_t>(pages * call.page_tokens);
  for (std::size_t token = 0; token < call.tokens; ++token) {
    const bool follows = token > 0 &&
                         call.sequence_index[token] == call.sequence_index[token - 1] &&
                         call.positions[token] == call.positions[token - 1] + 1;
    if (follows && plan.runs.back().tokens_count < run_tokens) {
      ++plan.runs.back().tokens_count;
      ++plan.runs.back().key_end;
      continue;
    }
    plan.runs.push_back({.first_token = token,
                         .tokens_count = 1,
                         .sequence = static_cast<std::size_t>(call.sequence_index[token]),
                         .key_end = call.positions[token] + std::int64_t{1},
                         .first_part = 0,
                         .splits_count = 0});
  }
  for (AttentionRun& run : plan.runs) {
    run.first_part = plan.parts_count;
    run.splits_count = static_cast<std::size_t>((run.key_end - 1) / plan.split_tokens + 1);
    plan.parts_count += run.splits_count * call.kv_heads;
  }
  const std::size_t row = padded(call.head_size);
  plan.part_floats = round_up(plan.queries_max * (2 + row), 16);
  // Queries, their ends, scores, and two parts (the running total and the split in work).
  plan.workspace_floats =
      round_up(plan.queries_max * (row + 1 + padded(call.page_tokens)), 16) + 2 * plan.part_floats;
}

// What one worker needs to compute the parts of a (run, kv head) pair.
class PairWork {
 public:
  PairWork(const AttentionCall& call, const AttentionPlan& plan, const Kernels& kernels,
           float* workspace)
      : call_(call), plan_(plan), kernels_(kernels), q_(workspace) {
    const std::size_t row = padded(call.head_size);
    ends_ = reinterpret_cast<std::int32_t*>(q_ + plan.queries_max * row);
    scores_ = q_ + plan.queries_max * (row + 1);
    parts_ = workspace + plan.workspace_floats - 2 * plan.part_floats;
  }

  // Copies the pair's queries, padded, and builds the tile without a result.
  void load(const AttentionRun& run, std::size_t kv_head) {
    run_ = &run;
    kv_head_ = kv_head;
    const std::size_t group = call_.q_heads / call_.kv_heads;
    const std::size_t row = padded(call_.head_size);
    for (std::size_t i = 0; i < run.tokens_count * group; ++i) {
      const std::size_t token = run.first_token + i / group;
      const std::size_t head = kv_head * group + i % group;
      const float* from = call_.q + (token * call_.q_heads + head) * call_.head_size;
      std::fill(std::copy_n(from, call_.head_size, q_ + i * row), q_ + (i + 1) * row, 0.0F);
      ends_[i] = call_.positions[token] + 1;
    }
  }

  AttentionTile tile(const PartView& result) const {
    const std::size_t head_offset = kv_head_ * call_.page_tokens * call_.head_size;
    return {
        .q = q_,
        .q_ends = ends_,
        .queries = static_cast<std::ptrdiff_t>(run_->tokens_count * call_.q_heads / call_.kv_heads),
        .k_pages = call_.k_pages + head_offset,
        .v_pages = call_.v_pages + head_offset,
        .page_row = call_.page_table + run_->sequence * call_.max_pages,
        .page_stride = call_.kv_heads * call_.page_tokens * call_.head_size,
        .head_size = static_cast<std::ptrdiff_t>(call_.head_size),
        .padded_size = static_cast<std::ptrdiff_t>(padded(call_.head_size)),
        .page_tokens = static_cast<std::ptrdiff_t>(call_.page_tokens),
        .scale = call_.scale,
        .key_begin = 0,
        .key_end = run_->key_end,
        .scores = scores_,
        .maximum = result.maximum,
        .sum = result.sum,
        .output = result.output};
  }

  void attend(std::size_t split, const PartView& result) const {
    AttentionTile part = tile(result);
    part.key_begin = static_cast<std::int64_t>(split) * plan_.split_tokens;
    part.key_end = std::min(run_->key_end, part.key_begin + plan_.split_tokens);
    kernels_.attend(part);
  }

  PartView total() const { return part_view(parts_, plan_.queries_max); }
  PartView current() const { return part_view(parts_ + plan_.part_floats, plan_.queries_max); }

  void clear_total() const {
    const PartView view = total();
    std::fill_n(view.maximum, plan_.queries_max, -3.0e38F);
    std::fill_n(view.sum, plan_.queries_max, 0.0F);
    std::fill_n(view.output, plan_.queries_max * padded(call_.head_size), 0.0F);
  }

  void merge(const PartView& part) const { kernels_.attend_merge(tile(total()), tile(part)); }

  void finish() const {
    const std::size_t group = call_.q_heads / call_.kv_heads;
    AttentionTile rows = tile(total());
    rows.queries = static_cast<std::ptrdiff_t>(group);
    for (std::size_t i = 0; i < run_->tokens_count; ++i) {
      const std::size_t head = (run_->first_token + i) * call_.q_heads + kv_head_ * group;
      kernels_.attend_finish(rows, call_.out + head * call_.head_size);
      rows.sum += group;
      rows.output += group * padded(call_.head_size);
    }
  }

 private:
  const AttentionCall& call_;
  const AttentionPlan& plan_;
  const Kernels& kernels_;
  float* q_;
  std::int32_t* ends_;
  float* scores_;
  float* parts_;
  const AttentionRun* run_ = nullptr;
  std::size_t kv_head_ = 0;
};

}  // namespace

void Executor::paged_attention(const AttentionCall& call) {
  if (call.tokens == 0) return;  // an empty tensor has no address
  const Exclusive exclusive(busy_);
  validate(call);
  plan_attention(call, attention_);
  const std::size_t pairs = attention_.runs.size() * call.kv_heads;
  const auto workers = static_cast<std::size_t>(threads_count());
  attention_.workspaces.get<float>(attention_.workspace_floats * workers);
  if (pairs == attention_.parts_count || pairs >= kPairsPerWorker * workers) {
    attend_pairs(call);
  } else {
    attend_parts(call);
  }
}

float* Executor::attention_workspace(int worker) {
  return attention_.workspaces.get<float>(1) +
         attention_.workspace_floats * static_cast<std::size_t>(worker);
}

// Enough pairs for all workers: each pair goes through its parts in order.
void Executor::attend_pairs(const AttentionCall& call) {
  const std::size_t runs = attention_.runs.size();
  pool_.run(runs * call.kv_heads, [&](std::uint32_t index, int worker) noexcept {
    PairWork work(call, attention_, *kernels_, attention_workspace(worker));
    // Last runs first: with a causal mask they are the longest.
    const AttentionRun& run = attention_.runs[runs - 1 - index / call.kv_heads];
    work.load(run, index % call.kv_heads);
    work.clear_total();
    for (std::size_t split = 0; split < run.splits_count; ++split) {
      work.attend(split, work.current());
      work.merge(work.current());
    }
    work.finish();
  });
}

// Few pairs with long contexts: the parts run in parallel, then each pair merges its own.
void Executor::attend_parts(const AttentionCall& call) {
  auto* parts = attention_.parts.get<float>(attention_.part_floats * attention_.parts_count);
  const auto part = [&](const AttentionRun& run, std::size_t head, std::size_t split) {
    const std::size_t number = run.first_part + head * run.splits_count + split;
    return part_view(parts + number * attention_.part_floats, attention_.queries_max);
  };
  pool_.run(attention_.parts_count, [&](std::uint32_t index, int worker) noexcept {
    PairWork work(call, attention_, *kernels_, attention_workspace(worker));
    const auto after = std::upper_bound(
        attention_.runs.begin(), attention_.runs.end(), index,
        [](std::size_t number, const AttentionRun& run) { return number < run.first_part; });
    const AttentionRun& run = *std::prev(after);
    const std::size_t number = index - run.first_part;
    const std::size_t head = number / run.splits_count;
    const std::size_t split = number % run.splits_count;
    work.load(run, head);
    work.attend(split, part(run, head, split));
  });
  pool_.run(attention_.runs.size() * call.kv_heads, [&](std::uint32_t index, int worker) noexcept {
    PairWork work(call, attention_, *kernels_, attention_workspace(worker));
    const AttentionRun& run = attention_.runs[index / call.kv_heads];
    const std::size_t head = index % call.kv_heads;
    work.load(run, head);
    work.clear_total();
    for (std::size_t split = 0; split < run.splits_count; ++split) {
      work.merge(part(run, head, split));
    }
    work.finish();
  });
}

void Executor::store_kv(const StoreKvCall& call) {
  if (call.tokens == 0) return;  // an empty tensor has no address
  const Exclusive exclusive(busy_);
  validate(call);
  const std::size_t head_page = call.page_tokens * call.head_size;
  for (std::size_t token = 0; token < call.tokens; ++token) {
    const auto position = static_cast<std::size_t>(call.positions[token]);
    const auto sequence = static_cast<std::size_t>(call.sequence_index[token]);
    const std::size_t entry = sequence * call.max_pages + position / call.page_tokens;
    const auto page = static_cast<std::size_t>(call.page_table[entry]);
    for (std::size_t head = 0; head < call.kv_heads; ++head) {
      const std::size_t from = (token * call.kv_heads + head) * call.head_size;
      const std::size_t to =
          (page * call.kv_heads + head) * head_page + position % call.page_tokens * call.head_size;
      std::transform(call.k + from, call.k + from + call.head_size, call.k_pages + to,
                     float_to_bf16);
      std::transform(call.v + from, call.v + from + call.head_size, call.v_pages + to,
                     float_to_bf16);
    }
  }
}

}  // namespace freetoken::exec
