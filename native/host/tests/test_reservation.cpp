#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "check.hpp"
#include "mapping.hpp"
#include "ranges.hpp"
#include "reservation.hpp"

namespace freetoken::host {
namespace {

constexpr std::uint64_t kPage = kHugePageBytes;

// Asks the kernel to read the byte, so that a fault is an answer and not the end of the test.
bool readable(const std::byte* address) {
  static const int fd = [] {
    int ends[2];
    return ::pipe(ends) == 0 ? ends[1] : -1;
  }();
  return ::write(fd, address, 1) == 1;
}

std::uint64_t resident_pages(std::byte* start, std::uint64_t length_bytes) {
  std::vector<unsigned char> present(length_bytes / 4096);
  CHECK_EQUAL(::mincore(start, length_bytes, present.data()), 0);
  std::uint64_t count = 0;
  for (const unsigned char flags : present) count += flags & 1U;
  return count;
}

// What RLIMIT_DATA counts; a sanitizer's own memory is in it.
std::uint64_t data_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmData:")) return std::stoull(line.substr(7)) * 1024;
  }
  return 0;
}

template <class Error, class Function>
bool throws(Function function) {
  try {
    function();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void memory_comes_with_commit_and_goes_with_release() {
  Reservation space(8 * kPage);
  CHECK_EQUAL(reinterpret_cast<std::uintptr_t>(space.data()) % kPage, std::uintptr_t{0});
  CHECK(!readable(space.data()));
  space.commit(0, 3 * kPage);
  CHECK_EQUAL(resident_pages(space.data(), 3 * kPage), 3 * kPage / 4096);
  CHECK(!readable(space.data() + 3 * kPage));
  std::memset(space.data(), 0x5a, 3 * kPage);
  space.release(kPage, 2 * kPage);
  CHECK(!readable(space.data() + kPage));
  CHECK(!readable(space.data() + 3 * kPage - 1));
  CHECK_EQUAL(static_cast<int>(space.data()[kPage - 1]), 0x5a);
  space.commit(kPage, kPage);
  CHECK_EQUAL(static_cast<int>(space.data()[kPage]), 0);
  CHECK_EQUAL(static_cast<int>(space.data()[0]), 0x5a);
}

void a_refused_commit_leaves_nothing_behind() {
  Reservation space(64 * kPage);
  space.commit(0, kPage);
  rlimit before{};
  CHECK_EQUAL(::getrlimit(RLIMIT_DATA, &before), 0);
  const rlimit tight{.rlim_cur = data_bytes() + 20 * kPage, .rlim_max = before.rlim_max};
  CHECK_EQUAL(::setrlimit(RLIMIT_DATA, &tight), 0);
  CHECK(throws<std::system_error>([&] { space.commit(kPage, 40 * kPage); }));
  CHECK_EQUAL(::setrlimit(RLIMIT_DATA, &before), 0);
  CHECK(!readable(space.data() + kPage));
  CHECK(readable(space.data()));
  space.commit(kPage, 40 * kPage);
  CHECK(readable(space.data() + 41 * kPage - 1));
}

void what_makes_no_sense_is_refused() {
  CHECK(throws<std::invalid_argument>([] { Reservation{0}; }));
  CHECK(throws<std::invalid_argument>([] { Reservation{kPage + 4096}; }));
  Reservation space(2 * kPage);
  CHECK(throws<std::invalid_argument>([&] { space.commit(4096, kPage); }));
  CHECK(throws<std::out_of_range>([&] { space.commit(kPage, 2 * kPage); }));
  space.close();
  space.close();
  CHECK(throws<std::logic_error>([&] { space.release(0, kPage); }));
}

void ranges_are_copied_and_compared() {
  std::vector<std::byte> left(3 * 4096 + 5, std::byte{1});
  std::vector<std::byte> right(left.size(), std::byte{2});
  copy_ranges({{left.data(), right.data(), 4096},
               {left.data() + 4096, right.data() + 4096, left.size() - 4096}});
  CHECK_EQUAL(first_difference(left.data(), right.data(), left.size()), left.size());
  for (const std::size_t at :
       {std::size_t{0}, std::size_t{4095}, std::size_t{4096}, left.size() - 1}) {
    right[at] = std::byte{3};
    CHECK_EQUAL(first_difference(left.data(), right.data(), left.size()), at);
    right[at] = std::byte{1};
  }
}

}  // namespace
}  // namespace freetoken::host

int main() {
  freetoken::host::memory_comes_with_commit_and_goes_with_release();
  freetoken::host::a_refused_commit_leaves_nothing_behind();
  freetoken::host::what_makes_no_sense_is_refused();
  freetoken::host::ranges_are_copied_and_compared();
  return 0;
}
