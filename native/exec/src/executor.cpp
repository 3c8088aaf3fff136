#include "executor.h"

#include <algorithm>
#include <utility>

#include "exclusive.h"
#include "isa.h"
#include "layout.h"
#include "validate.h"

namespace freetoken::exec {
Executor::Executor(std::vector<int> cpus, std::chrono::nanoseconds spin, std::string_view isa)
    : Executor(std::move(cpus), spin, select_kernels(isa)) {}

Executor::Executor(std::vector<int> cpus, std::chrono::nanoseconds spin, const Kernels* kernels)
    : pool_(std::move(cpus), spin),
      kernels_(kernels),
      sampling_(static_cast<std::size_t>(threads_count())) {
  accumulators_.get<float>(kTileSums * static_cast<std::size_t>(threads_count()));
}

void Executor::merge(const float* y, float* out, std::size_t tokens, std::size_t top_k,
                     std::size_t hidden) {
  if (tokens == 0) return;
  require(y != nullptr && out != nullptr, "merge: null address");
  require(top_k > 0 && hidden > 0, "merge: top_k and hidden_size must be positive");
  for_rows(tokens, top_k * hidden, [&](std::size_t token) {
    float* sum = out + token * hidden;
    const float* part = y + token * top_k * hidden;
    std::copy_n(part, hidden, sum);
    for (std::size_t k = 1; k < top_k; ++k) {
      for (std::size_t i = 0; i < hidden; ++i) sum[i] += part[k * hidden + i];
    }
  });
}

void Executor::rms_norm(const float* x, const float* weight, Bf16* y, std::size_t rows,
                        std::size_t size, float eps) {
  if (rows == 0) return;
  require(x != nullptr && weight != nullptr && y != nullptr, "rms_norm: null address");
  require(size > 0, "rms_norm: size must be positive");
  require(eps >= 0, "rms_norm: eps must not be negative");
  for_rows(rows, size, [&](std::size_t row) {
    kernels_->rms_norm(x + row * size, weight, size, eps, y + row * size);
  });
}

void Executor::sample(const SampleRowsCall& call) {
  if (call.rows == 0) return;
  const Exclusive exclusive(busy_);
  validate(call);
  sample_rows(pool_, call, sampling_);
}

void Executor::embed_rows16(const std::byte* w, const std::int64_t* ids, float* out,
                            std::size_t tokens, std::size_t features, std::size_t vocab_size) {
  if (tokens == 0) return;
  require(w != nullptr && ids != nullptr && out != nullptr, "embed_rows16: null address");
  require(features > 0, "embed_rows16: features must be positive");
  for (std::size_t token = 0; token < tokens; ++token) {
    require_index(ids[token], vocab_size, "embed_rows16: token id");
  }
  const std::size_t block_bytes = rows16_block_bytes(features);
  for_rows(tokens, features, [&](std::size_t token) {
    const auto row = static_cast<std::size_t>(ids[token]);
    const auto* block = reinterpret_cast<const Bf16*>(w + row / kRowsPerBlock * block_bytes);
    const std::size_t lane = row % kRowsPerBlock;
    for (std::size_t i = 0; i < features; ++i) {
      out[token * features + i] = bf16_to_float(block[(i / 2 * kRowsPerBlock + lane) * 2 + i % 2]);
    }
  });
}

std::uint64_t Executor::stream_read(const std::byte* data, std::size_t length_bytes) {
  const Exclusive exclusive(busy_);
  require_aligned(data, "stream_read: data");
  constexpr std::size_t kPiece = 1 << 20;
  std::atomic<std::uint64_t> sum{0};
  pool_.run(ceil_div(length_bytes, kPiece), [&](std::uint32_t tile, int) noexcept {
    const std::size_t begin = tile * kPiece;
    sum ^= kernels_->stream_read(data + begin, std::min(kPiece, length_bytes - begin));
  });
  return sum;
}

}  // namespace freetoken::exec
