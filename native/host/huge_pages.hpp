// Gives a mapping its memory in huge pages, ahead of the reads that fill it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace freetoken::host {

// Threads walk over the memory in steps: they touch one page of each huge page and then ask for the
// whole of it (MADV_COLLAPSE, Linux 6.1), which also works where a file in memory gets no huge
// pages by itself (shmem_enabled or a tmpfs that says "never"). What the memory holds stays as it
// is. Where the kernel refuses, the reads make the pages as they come.
class HugePages {
 public:
  // A multiple of the huge page. Each step waits for every cpu once (the kernel drains lists of
  // pages), so it must not be small; the first read waits for the first step.
  static constexpr std::uint64_t kStepBytes = std::uint64_t{16} << 20;

  // `data` is aligned to a huge page and stays mapped until the destructor has returned.
  HugePages(std::byte* data, std::uint64_t length_bytes, std::uint32_t threads_count);
  // Ends the threads after their running steps.
  ~HugePages();
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

  // Returns when the memory of these bytes is made, or will not be made by this object.
  void await(std::uint64_t offset_bytes, std::uint64_t length_bytes);
  // 0, or the errno with which the kernel refused a step.
  [[nodiscard]] int refusal() const { return refusal_.load(); }

 private:
  void make_steps();
  // 0 or an errno.
  [[nodiscard]] int make(std::uint64_t step) const;

  std::byte* data_;
  std::uint64_t length_bytes_;
  std::vector<std::atomic<bool>> made_;  // one for each step
  std::atomic<std::uint64_t> next_step_{0};
  std::atomic<int> refusal_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace freetoken::host
