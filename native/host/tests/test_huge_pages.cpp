#include <fcntl.h>

#include <cstring>
#include <fstream>
#include <string>

#include "huge_pages.hpp"
#include "temporary_file.hpp"

namespace freetoken::host {
namespace {

using test::memory;
using test::pattern;

constexpr std::uint64_t kPage = kHugePageBytes;

// Whether a file in memory can get huge pages at all: not before Linux 6.1, not where they are
// denied.
bool can_collapse() {
  const auto mapping = memory(kPage, kPage);
  std::memset(mapping->data(), 1, kPage);
  constexpr int kCollapse = 25;
  return ::madvise(mapping->data(), kPage, kCollapse) == 0;
}

std::uint64_t huge_bytes_at(const std::byte* address) {
  std::ifstream smaps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long start = 0;
    unsigned long kib = 0;
    if (std::sscanf(line.c_str(), "%lx-", &start) == 1 && line.find('-') < 17) {
      inside = start == wanted;
    } else if (inside && std::sscanf(line.c_str(), "ShmemPmdMapped: %lu kB", &kib) == 1) {
      return kib * 1024;
    }
  }
  return 0;
}

void memory_comes_in_huge_pages_and_keeps_its_bytes() {
  const std::uint64_t length = 3 * HugePages::kStepBytes + 3 * kPage;
  const auto mapping = memory(length + 4096, length + 4096);
  const auto bytes = pattern(3 * 4096, 7);
  const std::uint64_t at = HugePages::kStepBytes - 4096;  // across two steps
  std::memcpy(mapping->data() + at, bytes.data(), bytes.size());
  HugePages pages(mapping->data(), mapping->length_bytes(), 2);
  pages.await(0, length + 4096);
  CHECK_EQUAL(std::memcmp(mapping->data() + at, bytes.data(), bytes.size()), 0);
  CHECK_EQUAL(static_cast<int>(mapping->data()[length - 1]), 0);
  if (can_collapse()) {
    CHECK_EQUAL(pages.refusal(), 0);
    CHECK_EQUAL(huge_bytes_at(mapping->data()), length);
  } else {
    CHECK(pages.refusal() != 0);
  }
}

void a_refusal_lets_the_reads_go_on() {
  // What lies beyond the end of the file cannot be made.
  const auto mapping = memory(4 * HugePages::kStepBytes, kPage);
  HugePages pages(mapping->data(), mapping->length_bytes(), 2);
  pages.await(0, mapping->length_bytes());
  CHECK(pages.refusal() != 0);
}

void it_ends_early() {
  const auto mapping = memory(8 * HugePages::kStepBytes, 8 * HugePages::kStepBytes);
  const HugePages pages(mapping->data(), mapping->length_bytes(), 2);
}

void less_than_a_huge_page_is_left_alone() {
  const auto mapping = memory(kPage - 4096, kPage - 4096);
  HugePages pages(mapping->data(), mapping->length_bytes(), 1);
  pages.await(0, kPage);
  CHECK_EQUAL(pages.refusal(), 0);
}

}  // namespace
}  // namespace freetoken::host

int main() {
  freetoken::host::memory_comes_in_huge_pages_and_keeps_its_bytes();
  freetoken::host::a_refusal_lets_the_reads_go_on();
  freetoken::host::it_ends_early();
  freetoken::host::less_than_a_huge_page_is_left_alone();
  return 0;
}
