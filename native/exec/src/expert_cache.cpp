#include "expert_cache.h"

#include <algorithm>
#include <bit>

#include "validate.h"

namespace freetoken::exec {
namespace {

// Of call times that nobody has taken: the calls of many steps.
constexpr std::size_t kMostCallTimes = 4096;

double seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace

ExpertCache::ExpertCache(const ExpertCacheSpec& spec, FillLink& link)
    : spec_(spec),
      link_(link),
      planner_(spec.arrays,
               {.layers_count = spec.pool.layers_count,
                .experts_per_layer_count = spec.pool.experts_per_layer_count,
                .cpu_kernel = spec.cpu_kernel},
               spec.order),
      layers_(spec.pool.layers_count) {
  const std::size_t experts = spec.pool.experts_per_layer_count;
  require(spec.fillable != nullptr && spec.table_of_layer != nullptr &&
              spec.fill_count != nullptr && spec.buckets_count > 0,
          "an expert cache needs a table of fills");
  require(spec.pool.records != nullptr && (spec.slots != nullptr || !spec.arrays.slots_capacity),
          "an expert cache needs a pool and slots");
  for (Layer& layer : layers_) layer.streamed.resize(experts);
  records_.resize(experts);
  filled_.resize(experts);
  fills_.resize(experts);
  cpu_.resize(experts);
  uses_.resize(experts);
}

void ExpertCache::check(const RoutedTokens& routed) const {
  require(routed.moe_layer_index < spec_.pool.layers_count, "experts: no such MoE layer");
  require(routed.hidden == spec_.pool.hidden, "experts: rows of another size than the bank's");
}

const std::byte* ExpertCache::pooled(std::size_t moe_layer_index, std::size_t expert) const {
  const std::size_t id = moe_layer_index * spec_.pool.experts_per_layer_count + expert;
  return spec_.pool.records + id * spec_.pool.record_bytes;
}

// Whether the expert has a slot that its record is still on the way to.
bool ExpertCache::arrives(const Layer& layer, std::size_t expert) const {
  return layer.held && layer.streamed[expert] != 0 && !link_.is_done(layer.ticket);
}

void ExpertCache::decode(Executor& executor, const RoutedTokens& routed) {
  check(routed);
  const std::size_t pairs = routed.tokens * routed.top_k;
  auto* partial = partial_.get<float>(pairs * routed.hidden);
  pending_.assign(routed.ids, routed.ids + pairs);
  for (std::size_t pair = 0; pair < pairs; ++pair) {
    if (pending_[pair] < 0) std::fill_n(partial + pair * routed.hidden, routed.hidden, 0.0F);
  }
  int rounds = 0;
  Clock::time_point began;
  Clock::time_point executed;
  while (plan(routed)) {
    count_plan(layers_[routed.moe_layer_index], rounds == 0);
    ++rounds;
    began = Clock::now();
    std::uint64_t ticket = 0;
    if (fills_count_ > 0) {
      ticket = link_.submit(fills_.data(), static_cast<std::size_t>(fills_count_),
                            static_cast<std::size_t>(*spec_.arrays.slots_count));
    }
    try {
      place(routed.moe_layer_index);
      run(executor, routed, now_.data());
      executed = Clock::now();
    } catch (...) {
      if (fills_count_ > 0) link_.wait(ticket);  // the slots are said to hold these experts
      throw;
    }
    if (fills_count_ == 0) continue;
    link_.wait(ticket);
    run(executor, routed, later_.data());
  }
  if (rounds == 1 && stats_.misses > 0) note_times(routed, began, executed);
  executor.merge(partial, routed.out, routed.tokens, routed.top_k, routed.hidden);
  executions_count_.fetch_add(pairs);
}

// Of a call of one round, whose branches have both ended.
void ExpertCache::note_times(const RoutedTokens& routed, Clock::time_point began,
                             Clock::time_point executed) {
  if (call_times_.size() >= kMostCallTimes) return;
  const std::int64_t distinct = stats_.hits + stats_.misses;
  const auto per_expert = static_cast<std::uint64_t>((stats_.pairs + distinct - 1) / distinct);
  const bool filled = stats_.fills > 0;
  call_times_.push_back({.layer = static_cast<std::int32_t>(routed.moe_layer_index),
                         .bucket = static_cast<std::int32_t>(std::bit_width(per_expert - 1)),
                         .misses = static_cast<std::int32_t>(stats_.misses),
                         .fills = static_cast<std::int32_t>(stats_.fills),
                         .cpu = static_cast<std::int32_t>(distinct - stats_.fills),
                         .fill_s = filled ? seconds(link_.urgent_ended_at() - began) : 0.0,
                         .cpu_s = seconds(executed - began),
                         .layer_s = seconds(Clock::now() - began)});
}

std::vector<CallTimes> ExpertCache::take_call_times() {
  std::vector<CallTimes> taken;
  taken.swap(call_times_);
  return taken;
}

// Plans what is pending; false when nothing is.
bool ExpertCache::plan(const RoutedTokens& routed) {
  if (std::ranges::all_of(pending_, [](std::int32_t expert) { return expert < 0; })) return false;
  physical_.resize(pending_.size());
  const auto tokens = static_cast<std::int32_t>(routed.tokens);
  const auto table = static_cast<std::size_t>(spec_.table_of_layer[routed.moe_layer_index]);
  planner_.plan(
      {.moe_layer_index = routed.moe_layer_index,
       .routed = pending_.data(),
       .tokens_capacity = routed.tokens,
       .top_k = routed.top_k,
       .valid_tokens = &tokens,
       .fillable = spec_.fillable,
       .fill_count = spec_.fill_count + table * spec_.buckets_count * (spec_.misses_capacity + 1),
       .buckets_count = spec_.buckets_count,
       .misses_capacity = spec_.misses_capacity,
       .physical = physical_.data(),
       .fills = fills_.data(),
       .fills_count = &fills_count_,
       .cpu = cpu_.data(),
       .cpu_count = &cpu_count_,
       .stats = &stats_});
  return true;
}

void ExpertCache::count_plan(Layer& layer, bool first_round) {
  const auto add = [&](Count count, std::int64_t value) {
    layer.counts[count].fetch_add(static_cast<std::uint64_t>(value), std::memory_order_relaxed);
  };
  if (first_round) {
    add(kHits, stats_.hits);
    add(kMisses, stats_.misses);
  }
  add(kFills, stats_.fills);
  add(kEvictions, stats_.evictions);
  add(kCpu, is_last_round() ? stats_.cpu + stats_.deferred : stats_.cpu);
  gained_count_.fetch_add(stats_.fills - stats_.evictions, std::memory_order_relaxed);
}

// Whether another round would find what this one did. Slots that this one used, by fills or by
// hits, are free in the next; without any, what is left cannot be filled (no slot is free, or the
// layer's records are not pinned) and is the CPU's.
bool ExpertCache::is_last_round() const { return stats_.fills == 0 && stats_.hits == 0; }

// What runs before the fills and what after, from where; what stays pending.
void ExpertCache::place(std::size_t moe_layer_index) {
  const Layer& layer = layers_[moe_layer_index];
  const std::size_t experts = spec_.pool.experts_per_layer_count;
  std::ranges::fill(filled_, 0);
  for (std::int32_t at = 0; at < fills_count_; ++at) {
    const std::int32_t expert_id = fills_[static_cast<std::size_t>(at)].expert_id;
    filled_[static_cast<std::size_t>(expert_id) % experts] = 1;
  }
  now_.assign(pending_.size(), -1);
  later_.assign(pending_.size(), -1);
  for (std::size_t pair = 0; pair < pending_.size(); ++pair) {
    if (pending_[pair] < 0) continue;
    if (physical_[pair] == kDeferred && !is_last_round()) continue;
    const auto expert = static_cast<std::size_t>(pending_[pair]);
    const std::int32_t slot = physical_[pair];
    const bool in_slot = slot >= 0 && !arrives(layer, expert);
    records_[expert] = in_slot
                           ? spec_.slots + static_cast<std::size_t>(slot) * spec_.pool.record_bytes
                           : pooled(moe_layer_index, expert);
    (filled_[expert] != 0 ? later_ : now_)[pair] = pending_[pair];
    pending_[pair] = -1;
  }
}

void ExpertCache::run(Executor& executor, const RoutedTokens& routed, const std::int32_t* ids) {
  const ExpertBank& pool = spec_.pool;
  executor.experts({.x = routed.x,
                    .expert_ids = ids,
                    .weights = routed.weights,
                    .y = partial_.get<float>(routed.tokens * routed.top_k * routed.hidden),
                    .tokens = routed.tokens,
                    .top_k = routed.top_k,
                    .hidden = pool.hidden,
                    .intermediate = pool.intermediate,
                    .bank = nullptr,
                    .record_bytes = pool.record_bytes,
                    .experts_count = pool.experts_per_layer_count,
                    .format = pool.format,
                    .has_bias = pool.has_bias,
                    .glu = pool.glu,
                    .fast = pool.fast,
                    .records = records_.data(),
                    .keep_absent = true});
}

void ExpertCache::sweep(Executor& executor, const RoutedTokens& routed) {
  check(routed);
  const std::size_t at = routed.moe_layer_index;
  const std::size_t end = std::min(at + ahead_count_ + 1, layers_.size());
  for (std::size_t layer = at; layer < end; ++layer) {
    if (!layers_[layer].held) hold(layer, nullptr);
  }
  link_.wait(layers_[at].ticket);
  for (std::size_t expert = 0; expert < records_.size(); ++expert) {
    const std::size_t id = at * records_.size() + expert;
    const std::int32_t slot = spec_.arrays.slot_of_expert[id];
    records_[expert] = slot >= 0
                           ? spec_.slots + static_cast<std::size_t>(slot) * spec_.pool.record_bytes
                           : pooled(at, expert);
  }
  const std::size_t pairs = routed.tokens * routed.top_k;
  auto* partial = partial_.get<float>(pairs * routed.hidden);
  for (std::size_t pair = 0; pair < pairs; ++pair) {
    if (routed.ids[pair] < 0) std::fill_n(partial + pair * routed.hidden, routed.hidden, 0.0F);
  }
  run(executor, routed, routed.ids);
  executor.merge(partial, routed.out, routed.tokens, routed.top_k, routed.hidden);
  executions_count_.fetch_add(pairs);
  release(at, &routed);
}

void ExpertCache::prefetch(std::size_t moe_layer_index, const std::int32_t* wanted) {
  require(moe_layer_index < layers_.size(), "experts: no such MoE layer");
  if (!layers_[moe_layer_index].held) hold(moe_layer_index, wanted);
}

// Slots for a layer's experts, held until it is computed; their records are on the way.
void ExpertCache::hold(std::size_t moe_layer_index, const std::int32_t* wanted) {
  Layer& layer = layers_[moe_layer_index];
  planner_.reserve({.moe_layer_index = moe_layer_index,
                    .fillable = spec_.fillable,
                    .wanted = wanted,
                    .fills = fills_.data(),
                    .fills_count = &fills_count_,
                    .stats = &stats_});
  std::ranges::fill(layer.streamed, 0);
  for (std::int32_t at = 0; at < fills_count_; ++at) {
    const auto expert_id = static_cast<std::size_t>(fills_[static_cast<std::size_t>(at)].expert_id);
    layer.streamed[expert_id % layer.streamed.size()] = 1;
  }
  layer.ticket = link_.submit(fills_.data(), static_cast<std::size_t>(fills_count_),
                              static_cast<std::size_t>(*spec_.arrays.slots_count), FillLane::kBulk);
  layer.held = true;
  streamed_count_.fetch_add(static_cast<std::uint64_t>(stats_.fills));
  gained_count_.fetch_add(stats_.fills - stats_.evictions, std::memory_order_relaxed);
}

// The layer's slots are free again. `routed`: what was computed with them, or null.
void ExpertCache::release(std::size_t moe_layer_index, const RoutedTokens* routed) {
  std::ranges::fill(uses_, 0);
  std::size_t tokens = 0;
  if (routed != nullptr) {
    tokens = routed->tokens;
    for (std::size_t pair = 0; pair < tokens * routed->top_k; ++pair) {
      if (routed->ids[pair] >= 0) ++uses_[static_cast<std::size_t>(routed->ids[pair])];
    }
  }
  planner_.release({.moe_layer_index = moe_layer_index,
                    .uses = uses_.data(),
                    .tokens_count = tokens,
                    .kept_count = kept_count_});
  layers_[moe_layer_index].held = false;
}

void ExpertCache::let_go() {
  for (std::size_t at = 0; at < layers_.size(); ++at) {
    if (!layers_[at].held) continue;
    link_.wait(layers_[at].ticket);
    release(at, nullptr);
  }
}

LayerCounts ExpertCache::layer_counts(std::size_t moe_layer_index) const {
  require(moe_layer_index < layers_.size(), "experts: no such MoE layer");
  const auto& counts = layers_[moe_layer_index].counts;
  return {.hits = counts[kHits].load(std::memory_order_relaxed),
          .misses = counts[kMisses].load(std::memory_order_relaxed),
          .fills = counts[kFills].load(std::memory_order_relaxed),
          .cpu = counts[kCpu].load(std::memory_order_relaxed),
          .evictions = counts[kEvictions].load(std::memory_order_relaxed)};
}

}  // namespace freetoken::exec
