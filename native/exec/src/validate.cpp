#include "validate.h"

#include <limits>
#include <stdexcept>
#include <string>

#include "executor.h"
#include "layout.h"

namespace freetoken::exec {
namespace {

constexpr std::size_t kMaxDimension = std::size_t{1} << 30;

void require_dimension(std::size_t value, std::string_view name) {
  if (value > 0 && value <= kMaxDimension) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                              "; it must be between 1 and " + std::to_string(kMaxDimension));
}

void require_rows(std::size_t rows) {
  require(rows <= std::numeric_limits<std::uint32_t>::max() / 2, "too many tokens in one call");
}

// Page table and positions, shared by store_kv and paged_attention.
template <class Call>
void require_pages(const Call& call) {
  require(call.k_pages != nullptr && call.v_pages != nullptr && call.page_table != nullptr &&
              call.sequence_index != nullptr && call.positions != nullptr,
          "null address of pages, page table, sequence indices or positions");
  require_dimension(call.kv_heads, "kv_heads");
  require_dimension(call.head_size, "head_size");
  require_dimension(call.page_tokens, "page_tokens");
  require_dimension(call.max_pages, "max_pages");
  require_rows(call.tokens);
}

template <class Call>
void require_position(const Call& call, std::size_t token) {
  require_index(call.sequence_index[token], call.sequences, "sequence index");
  require_index(call.positions[token], call.max_pages * call.page_tokens, "position");
}

}  // namespace

void refuse(std::string_view message) { throw std::invalid_argument(std::string(message)); }

void require_aligned(const void* address, std::string_view name) {
  const auto value = reinterpret_cast<std::uintptr_t>(address);
  if (value != 0 && value % kWeightAlignment == 0) return;
  throw std::invalid_argument(std::string(name) + " must be at a 64-byte boundary, but is at " +
                              std::to_string(value));
}

void require_index(std::int64_t value, std::size_t bound, std::string_view name) {
  if (value >= 0 && (bound == 0 || static_cast<std::size_t>(value) < bound)) return;
  std::string text = std::string(name) + " " + std::to_string(value) + " is out of range";
  if (bound != 0) text += " [0, " + std::to_string(bound) + ")";
  throw std::invalid_argument(text);
}

namespace {

void require_columns(const WeightFormat& format, std::size_t columns, std::string_view name) {
  const std::size_t multiple = format.column_multiple();
  require(columns % multiple == 0, std::string(name) + " " + std::to_string(columns) +
                                       " is not a multiple of " + std::to_string(multiple) +
                                       ", the group of " + format.name());
}

}  // namespace

void validate(const LinearCall& call) {
  require_dimension(call.in_features, "in_features");
  require_rows(call.tokens);
  require(call.x != nullptr, "linear: null address of x");
  for (const LinearOutput& output : call.outputs) {
    require_dimension(output.out_features, "out_features");
    require_columns(output.format, call.in_features, "in_features");
    require_aligned(output.w, "linear: w");
    require(output.y != nullptr, "linear: null address of y");
  }
}

void validate(const ExpertsCall& call) {
  require_dimension(call.hidden, "hidden_size");
  require_dimension(call.intermediate, "intermediate_size");
  require_columns(call.format, call.hidden, "hidden_size");
  require_columns(call.format, call.intermediate, "intermediate_size");
  require_dimension(call.experts_count, "experts_count");
  require_dimension(call.top_k, "top_k");
  require(call.top_k <= call.experts_count, "top_k is larger than experts_count");
  require(call.glu.limit >= 0, "the limit of the activation must not be negative");
  require_rows(call.tokens * call.top_k);
  if (call.records == nullptr) require_aligned(call.bank, "experts: bank");
  require(call.x != nullptr && call.expert_ids != nullptr && call.weights != nullptr &&
              call.y != nullptr,
          "experts: null address of x, expert_ids, weights or y");
  const std::size_t needed_bytes =
      expert_layout(call.format, call.hidden, call.intermediate, call.has_bias).bytes;
  require(call.record_bytes >= needed_bytes && call.record_bytes % kWeightAlignment == 0,
          "record_bytes " + std::to_string(call.record_bytes) +
              " must be a multiple of 64 of at "
              "least " +
              std::to_string(needed_bytes) + " bytes, the size of one expert");
  for (std::size_t i = 0; i < call.tokens * call.top_k; ++i) {
    if (call.expert_ids[i] == -1) continue;
    require_index(call.expert_ids[i], call.experts_count, "expert id");
    if (call.records != nullptr) {
      require_aligned(call.records[call.expert_ids[i]], "experts: record");
    }
  }
}

void validate(const StoreKvCall& call) {
  require_pages(call);
  require(call.k != nullptr && call.v != nullptr, "store_kv: null address of k or v");
  for (std::size_t token = 0; token < call.tokens; ++token) {
    require_position(call, token);
    const auto sequence = static_cast<std::size_t>(call.sequence_index[token]);
    const std::size_t page = static_cast<std::size_t>(call.positions[token]) / call.page_tokens;
    require_index(call.page_table[sequence * call.max_pages + page], call.pages, "page number");
  }
}

void validate(const AttentionCall& call) {
  require_pages(call);
  require_dimension(call.q_heads, "q_heads");
  require(call.q_heads % call.kv_heads == 0, "q_heads must be a multiple of kv_heads");
  require(call.q != nullptr && call.out != nullptr, "paged_attention: null address of q or out");
  for (std::size_t token = 0; token < call.tokens; ++token) {
    require_position(call, token);
    const auto sequence = static_cast<std::size_t>(call.sequence_index[token]);
    // Neighbouring tokens of a sequence share their pages: check them at its last token only.
    if (token + 1 < call.tokens && call.sequence_index[token + 1] == call.sequence_index[token] &&
        call.positions[token + 1] >= call.positions[token]) {
      continue;
    }
    const std::size_t last = static_cast<std::size_t>(call.positions[token]) / call.page_tokens;
    for (std::size_t page = 0; page <= last; ++page) {
      require_index(call.page_table[sequence * call.max_pages + page], call.pages, "page number");
    }
  }
}

void validate(const SampleRowsCall& call) {
  require(call.logits != nullptr && call.params != nullptr && call.token_ids != nullptr &&
              call.peaks != nullptr,
          "sample: null address");
  require(call.rows <= WorkerPool::kMaxTiles, "sample: too many rows");
  require(call.vocab > 0 && call.vocab <= INT32_MAX,
          "sample: vocab_size must be positive and below 2^31");
  for (std::size_t row = 0; row < call.rows; ++row) {
    const SamplingParams& params = call.params[row];
    require(params.temperature >= 0 && params.top_p >= 0 && params.min_p >= 0,
            "sample: temperature, top_p and min_p must be numbers that are not negative");
  }
}

}  // namespace freetoken::exec
