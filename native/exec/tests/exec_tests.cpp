// The executor without Python, small enough to run under the sanitizers in seconds.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "executor.h"
#include "isa.h"
#include "layout.h"
#include "worker_pool.h"

namespace {

using namespace freetoken::exec;
using namespace std::chrono_literals;

void check(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::_Exit(1);
}

// A page that may not be touched follows the last byte: reading or writing one byte too far ends
// the test in every build, also inside vector code that sanitizers do not see.
template <class T>
class Guarded {
 public:
  explicit Guarded(std::size_t count) : count_(count) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t used = round_up(count * sizeof(T), page);
    length_bytes_ = used + page;
    memory_ =
        mmap(nullptr, length_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory_ != MAP_FAILED, "mmap");
    auto* bytes = static_cast<std::byte*>(memory_);
    check(mprotect(bytes + used, page, PROT_NONE) == 0, "mprotect");
    data_ = reinterpret_cast<T*>(bytes + used - count * sizeof(T));
  }
  ~Guarded() { munmap(memory_, length_bytes_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() { return data_; }
  T& operator[](std::size_t index) { return data_[index]; }
  std::size_t size() const { return count_; }

 private:
  std::size_t count_;
  std::size_t length_bytes_ = 0;
  void* memory_ = nullptr;
  T* data_ = nullptr;
};

// A small deterministic generator of values in [-1, 1).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15U + 1) {}
  float next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<float>(state_ >> 40) / static_cast<float>(1 << 23) - 1.0F;
  }
  template <class Buffer>
  void fill_bf16(Buffer& buffer) {
    for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] = float_to_bf16(next());
  }
  template <class Buffer>
  void fill(Buffer& buffer) {
    for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] = next();
  }

 private:
  std::uint64_t state_;
};

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
  executor.linear_bf16({.x = x.data(),
                        .w = reinterpret_cast<const std::byte*>(packed.data()),
                        .bias = bias.data(),
                        .y = y.data(),
                        .tokens = tokens,
                        .in_features = in,
                        .out_features = out});
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
  check(error <= 1e-12 * norm, std::string("linear: error too large on ") + executor.isa());
  return {y.data(), y.data() + y.size()};
}

std::vector<float> run_experts(Executor& executor, std::size_t tokens) {
  constexpr std::size_t kHidden = 50;
  constexpr std::size_t kIntermediate = 23;
  constexpr std::size_t kExperts = 5;
  constexpr std::size_t kTopK = 2;
  const std::size_t record = round_up(expert_bf16_bytes(kHidden, kIntermediate), kWeightAlignment);
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
  executor.experts_bf16({.x = x.data(),
                         .expert_ids = ids.data(),
                         .weights = weights.data(),
                         .y = y.data(),
                         .tokens = tokens,
                         .top_k = kTopK,
                         .hidden = kHidden,
                         .intermediate = kIntermediate,
                         .bank = reinterpret_cast<const std::byte*>(bank.data()),
                         .record_bytes = record,
                         .experts_count = kExperts});
  Guarded<float> merged(tokens * kHidden);
  executor.merge(y.data(), merged.data(), tokens, kTopK, kHidden);
  for (std::size_t i = 0; i < kHidden; ++i) {
    check(merged[i] == y[i] + y[kHidden + i], "merge: not the sum in routed order");
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
    check(out[i] == float_to_bf16(v[i]), "attention: first token");
  }
  return {out.data(), out.data() + out.size()};
}

void test_isa(const std::string& isa) {
  Executor one({0}, 50us, isa);
  Executor many({0, 1, 0, 1}, 20us, isa);
  for (const std::size_t tokens : {1U, 2U, 7U, 30U}) {
    check(run_linear(one, tokens, 37, 50) == run_linear(many, tokens, 37, 50), "linear threads");
    check(run_experts(one, tokens) == run_experts(many, tokens), "experts threads");
  }
  check(run_linear(one, 3, 128, 512) == run_linear(many, 3, 128, 512), "linear threads");
  for (const std::size_t head_size : {1U, 16U, 40U}) {
    check(run_attention(one, 21, head_size, 21) == run_attention(many, 21, head_size, 21),
          "attention threads");
  }
  check(run_attention(one, 1100, 4, 2) == run_attention(many, 1100, 4, 2), "attention in parts");
}

void test_instruction_sets_agree() {
  std::vector<float> expected;
  for (const std::string& isa : available_isas()) {
    test_isa(isa);
    if (isa == "avx512_bf16") continue;  // vdpbf16ps rounds in its own way
    Executor executor({0, 1}, 50us, isa);
    const std::vector<float> result = run_linear(executor, 5, 200, 40);
    if (expected.empty()) expected = result;
    check(result == expected, isa + " differs from the other instruction sets");
  }
}

// Every tile exactly once, over many jobs, whether workers spin or sleep in between.
void test_pool(std::chrono::nanoseconds spin) {
  WorkerPool pool({0, 1, 0, 1}, spin);
  std::vector<int> runs(257);
  for (std::size_t job = 0; job < 400; ++job) {
    const std::size_t tiles = job * 37 % runs.size();
    std::fill(runs.begin(), runs.end(), 0);
    pool.run(tiles, [&](std::uint32_t tile, int worker) noexcept {
      check(worker >= 0 && worker < pool.workers_count(), "worker number");
      ++runs[tile];
    });
    for (std::size_t i = 0; i < runs.size(); ++i) check(runs[i] == (i < tiles ? 1 : 0), "tiles");
    if (job % 50 == 0) std::this_thread::sleep_for(spin + 200us);
  }
}

template <class Error>
void refuses(const std::string& what, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error&) {
    return;
  }
  check(false, what + " was not refused");
}

void test_refusals() {
  refuses<std::invalid_argument>("unknown isa", [] { Executor executor({0}, 1us, "sse9"); });
  refuses<std::invalid_argument>("no cpus", [] { Executor executor({}, 1us, "auto"); });
  refuses<std::invalid_argument>("cpu -1", [] { Executor executor({0, -1}, 1us, "auto"); });
  Executor executor({0, 1}, 1us, "auto");
  refuses<std::invalid_argument>("unaligned weights", [&] {
    alignas(64) std::byte memory[256] = {};
    executor.linear_bf16({.x = reinterpret_cast<const Bf16*>(memory),
                          .w = memory + 8,
                          .bias = nullptr,
                          .y = reinterpret_cast<float*>(memory),
                          .tokens = 1,
                          .in_features = 2,
                          .out_features = 2});
  });
}

}  // namespace

int main() {
  test_pool(0us);
  test_pool(50us);
  test_refusals();
  test_instruction_sets_agree();
  std::puts("executor: all tests passed");
  return 0;
}
