#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <utility>

#include "loader.hpp"
#include "temporary_file.hpp"

namespace freetoken::host {
namespace {

using test::memory;
using test::pattern;
using test::TemporaryFile;

constexpr std::uint64_t kChunk = 16384;

// Alters the completions of real reads.
class FaultyQueue final : public ReadQueue {
 public:
  using Fault = std::function<std::int64_t(const ReadRequest&, std::int64_t result)>;
  explicit FaultyQueue(Fault fault) : fault_(std::move(fault)) {}
  [[nodiscard]] std::uint32_t capacity() const override { return 1; }
  void submit(const ReadRequest& request) override {
    request_ = request;
    real_->submit(request);
  }
  std::size_t wait(std::span<ReadCompletion> out) override {
    const std::size_t count = real_->wait(out);
    for (std::size_t i = 0; i < count; ++i) out[i].result = fault_(request_, out[i].result);
    return count;
  }

 private:
  Fault fault_;
  ReadRequest request_;
  std::unique_ptr<ReadQueue> real_ = make_pread_queue();
};

LoadOptions options(const FaultyQueue::Fault& fault = nullptr) {
  LoadOptions chosen{.chunk_bytes = std::uint32_t{kChunk}, .make_queue = {}};
  if (fault) chosen.make_queue = [fault] { return std::make_unique<FaultyQueue>(fault); };
  return chosen;
}

LoadOutcome load(const std::shared_ptr<Mapping>& mapping, std::vector<LoadFile> files,
                 LoadOptions chosen) {
  Loader loader(mapping, std::move(files), std::move(chosen));
  loader.start();
  CHECK(loader.wait_for(60.0));
  return loader.outcome();
}

void check_bytes(const Mapping& mapping, std::uint64_t offset,
                 const std::vector<unsigned char>& bytes) {
  CHECK_EQUAL(std::memcmp(mapping.data() + offset, bytes.data(), bytes.size()), 0);
}

void both_ways_read_the_same_bytes() {
  for (const std::size_t length :
       {1UL, 4095UL, 4096UL, 4097UL, 16383UL, 16384UL, 16385UL, 1000001UL}) {
    const auto first = pattern(length, 1);
    const auto second = pattern(length + 5000, 2);
    const TemporaryFile a(first);
    const TemporaryFile b(second);
    const std::uint64_t second_at = (length + 4095) / 4096 * 4096;
    const std::uint64_t total = second_at + second.size();
    for (const bool uring : {true, false}) {
      for (const bool direct : {true, false}) {
        const auto mapping = memory(total, total);
        LoadOptions chosen = options();
        chosen.use_uring = uring;
        chosen.use_direct = direct;
        const LoadOutcome outcome = load(
            mapping, {{a.path(), 0, first.size()}, {b.path(), second_at, second.size()}}, chosen);
        CHECK(outcome.failure == LoadFailure::kNone);
        CHECK_EQUAL(outcome.loaded_bytes, first.size() + second.size());
        check_bytes(*mapping, 0, first);
        check_bytes(*mapping, second_at, second);
      }
    }
  }
}

void a_place_that_is_not_aligned_is_read_through_the_cache() {
  const auto bytes = pattern(100000, 3);
  const TemporaryFile file(bytes);
  const auto mapping = memory(200000, 200000);
  const LoadOutcome outcome = load(mapping, {{file.path(), 777, bytes.size()}}, options());
  CHECK(outcome.failure == LoadFailure::kNone);
  CHECK_EQUAL(outcome.buffered_files_count, 1U);
  check_bytes(*mapping, 777, bytes);
}

void an_io_error_names_file_and_offset() {
  const auto bytes = pattern(10 * kChunk, 4);
  const TemporaryFile good(bytes);
  const TemporaryFile bad(bytes);
  const auto mapping = memory(20 * kChunk, 20 * kChunk);
  const std::byte* fail_at = mapping->data() + 13 * kChunk;
  const LoadOutcome outcome =
      load(mapping, {{good.path(), 0, bytes.size()}, {bad.path(), 10 * kChunk, bytes.size()}},
           options([fail_at](const ReadRequest& request, std::int64_t result) {
             return request.destination == fail_at ? -EIO : result;
           }));
  CHECK(outcome.failure == LoadFailure::kRead);
  CHECK_EQUAL(outcome.error_number, EIO);
  CHECK_EQUAL(outcome.path, bad.path());
  CHECK_EQUAL(outcome.offset_bytes, 3U * kChunk);
}

void transient_errors_and_short_reads_are_completed() {
  const auto bytes = pattern(20 * kChunk + 123, 5);
  const TemporaryFile file(bytes);
  const auto mapping = memory(bytes.size(), bytes.size());
  std::atomic<int> calls_count{0};
  const LoadOutcome outcome =
      load(mapping, {{file.path(), 0, bytes.size()}},
           options([&calls_count](const ReadRequest& request, std::int64_t result) {
             switch (calls_count.fetch_add(1) % 4) {
               case 0:
                 return std::int64_t{-EAGAIN};
               case 1:
                 return std::int64_t{-EINTR};
               case 2:  // only 1000 bytes arrived
                 std::memset(request.destination + 1000, 0, request.length_bytes - 1000);
                 return std::int64_t{1000};
               default:
                 return result;
             }
           }));
  CHECK(outcome.failure == LoadFailure::kNone);
  CHECK_EQUAL(outcome.loaded_bytes, bytes.size());
  check_bytes(*mapping, 0, bytes);
}

void a_refused_direct_read_is_repeated_through_the_cache() {
  const auto bytes = pattern(20 * kChunk + 1, 6);
  const TemporaryFile file(bytes);
  const auto mapping = memory(bytes.size(), bytes.size());
  const LoadOutcome outcome = load(mapping, {{file.path(), 0, bytes.size()}},
                                   options([](const ReadRequest& request, std::int64_t result) {
                                     const bool direct =
                                         (::fcntl(request.fd, F_GETFL) & O_DIRECT) != 0;
                                     return direct ? std::int64_t{-EINVAL} : result;
                                   }));
  CHECK(outcome.failure == LoadFailure::kNone);
  CHECK_EQUAL(outcome.buffered_files_count, 1U);
  CHECK_EQUAL(outcome.loaded_bytes, bytes.size());
  check_bytes(*mapping, 0, bytes);
}

void an_end_that_moves_while_reading_is_found() {
  const auto bytes = pattern(40 * kChunk, 7);
  for (const bool direct : {true, false}) {
    const TemporaryFile file(bytes);
    const auto mapping = memory(bytes.size(), bytes.size());
    std::atomic<bool> cut{false};
    LoadOptions chosen = options([&](const ReadRequest&, std::int64_t result) {
      if (!cut.exchange(true)) file.truncate(20 * kChunk + 100);
      return result;
    });
    chosen.use_direct = direct;
    chosen.max_depth_count = 1;
    const LoadOutcome outcome = load(mapping, {{file.path(), 0, bytes.size()}}, chosen);
    CHECK(outcome.failure == LoadFailure::kLength);
    CHECK_EQUAL(outcome.path, file.path());
    CHECK_EQUAL(outcome.actual_bytes, 20U * kChunk + 100);
  }
}

void memory_that_cannot_be_allocated_is_not_the_disks_fault() {
  const auto bytes = pattern(8 * kChunk, 8);
  const TemporaryFile file(bytes);
  for (const bool uring : {true, false}) {
    const auto mapping = memory(bytes.size(), 4 * kChunk);
    LoadOptions chosen = options();
    chosen.use_uring = uring;
    const LoadOutcome outcome = load(mapping, {{file.path(), 0, bytes.size()}}, chosen);
    CHECK(outcome.failure == LoadFailure::kMemory);
    CHECK_EQUAL(outcome.error_number, EFAULT);
    CHECK(outcome.offset_bytes >= 4 * kChunk);
  }
}

void cancel_ends_the_load_and_frees_the_mapping() {
  const auto bytes = pattern(64 * kChunk, 9);
  const TemporaryFile file(bytes);
  const auto mapping = memory(bytes.size(), bytes.size());
  std::atomic<int> reads_count{0};
  Loader* running = nullptr;
  LoadOptions chosen = options([&](const ReadRequest&, std::int64_t result) {
    if (reads_count.fetch_add(1) == 3) running->cancel();
    return result;
  });
  chosen.max_depth_count = 2;
  Loader loader(mapping, {{file.path(), 0, bytes.size()}}, chosen);
  running = &loader;
  bool refused = false;
  try {
    mapping->close();
  } catch (const std::logic_error&) {
    refused = true;
  }
  CHECK(refused);
  loader.start();
  CHECK(loader.wait_for(60.0));
  CHECK(loader.outcome().failure == LoadFailure::kCancelled);
  CHECK(loader.done_bytes() < bytes.size());
  CHECK(reads_count.load() <= 6);
  mapping->close();  // although the loader still exists
}

}  // namespace
}  // namespace freetoken::host

int main() {
  using namespace freetoken::host;
  both_ways_read_the_same_bytes();
  a_place_that_is_not_aligned_is_read_through_the_cache();
  an_io_error_names_file_and_offset();
  transient_errors_and_short_reads_are_completed();
  a_refused_direct_read_is_repeated_through_the_cache();
  an_end_that_moves_while_reading_is_found();
  memory_that_cannot_be_allocated_is_not_the_disks_fault();
  cancel_ends_the_load_and_frees_the_mapping();
  return 0;
}
