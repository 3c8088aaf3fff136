#include "huge_pages.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "mapping.hpp"
#include "native_thread.hpp"

namespace freetoken::host {
namespace {

// Newer than some C libraries' headers.
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE
constexpr int kCollapse = 25;       // MADV_COLLAPSE

constexpr std::uint64_t kTouchedBytes = 4096;

}  // namespace

HugePages::HugePages(std::byte* data, std::uint64_t length_bytes, std::uint32_t threads_count)
    : data_(data),
      length_bytes_(length_bytes / kHugePageBytes * kHugePageBytes),
      made_((length_bytes_ + kStepBytes - 1) / kStepBytes) {
  for (std::uint32_t i = 0; i < threads_count; ++i) {
    threads_.push_back(start_thread("ftk-pages", [this] { make_steps(); }));
  }
}

HugePages::~HugePages() {
  stop_.store(true);
  for (std::thread& thread : threads_) thread.join();
}

void HugePages::await(std::uint64_t offset_bytes, std::uint64_t length_bytes) {
  const std::uint64_t end_bytes = std::min(offset_bytes + length_bytes, length_bytes_);
  for (auto step = offset_bytes / kStepBytes; step * kStepBytes < end_bytes; ++step) {
    made_[step].wait(false);
  }
}

void HugePages::make_steps() {
  for (auto step = next_step_.fetch_add(1); step < made_.size(); step = next_step_.fetch_add(1)) {
    if (!stop_.load() && refusal_.load() == 0) {
      if (const int error = make(step); error != 0) refusal_.store(error);
    }
    made_[step].store(true);
    made_[step].notify_all();
  }
}

int HugePages::make(std::uint64_t step) const {
  std::byte* const begin = data_ + step * kStepBytes;
  const std::uint64_t bytes = std::min(kStepBytes, length_bytes_ - step * kStepBytes);
  for (std::uint64_t at = 0; at < bytes; at += kHugePageBytes) {
    if (::madvise(begin + at, kTouchedBytes, kPopulateWrite) != 0) return errno;
  }
  if (::madvise(begin, bytes, kCollapse) == 0) return 0;
  // A page that is busy for a moment (EAGAIN, EBUSY) stays small; it says nothing about the next.
  return errno == EAGAIN || errno == EBUSY ? 0 : errno;
}

}  // namespace freetoken::host
