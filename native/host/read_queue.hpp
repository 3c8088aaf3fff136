// Asynchronous reads into memory: one queue per worker thread, two implementations, same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace freetoken::host {

struct ReadRequest {
  int fd = -1;
  std::byte* destination = nullptr;
  std::uint64_t offset_bytes = 0;
  std::uint32_t length_bytes = 0;
  std::uint64_t token = 0;  // comes back with the completion
};

struct ReadCompletion {
  std::uint64_t token = 0;
  std::int64_t result = 0;  // bytes read, or a negated errno
};

// Used by one thread. The destination must stay mapped until the completion was taken.
class ReadQueue {
 public:
  virtual ~ReadQueue() = default;
  [[nodiscard]] virtual std::uint32_t capacity() const = 0;
  // Never more than `capacity()` requests may be outstanding.
  virtual void submit(const ReadRequest& request) = 0;
  // Blocks until at least one outstanding request has ended; returns how many it wrote to `out`.
  virtual std::size_t wait(std::span<ReadCompletion> out) = 0;
};

// io_uring through raw system calls. Throws std::system_error where the kernel, a seccomp filter
// or sysctl kernel.io_uring_disabled does not allow it.
std::unique_ptr<ReadQueue> make_uring_queue(std::uint32_t capacity);

// "" when io_uring can be used here, else why not.
std::string uring_refusal();

// One blocking pread at a time.
std::unique_ptr<ReadQueue> make_pread_queue();

}  // namespace freetoken::host
