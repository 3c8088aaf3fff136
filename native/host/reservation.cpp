#include "reservation.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "mapping.hpp"

namespace freetoken::host {
namespace {

constexpr std::uint64_t kBasePageBytes = 4096;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14; older headers lack it

[[noreturn]] void throw_errno(int error_number, const char* what) {
  throw std::system_error(error_number, std::generic_category(), what);
}

// 0 or an errno. Where the kernel cannot populate by itself, a write to each page does it.
int populate(std::byte* start, std::uint64_t length_bytes) {
  if (::madvise(start, length_bytes, kPopulateWrite) == 0) return 0;
  if (errno != EINVAL) return errno;
  for (std::uint64_t at = 0; at < length_bytes; at += kBasePageBytes) {
    *static_cast<volatile std::byte*>(start + at) = std::byte{0};
  }
  return 0;
}

}  // namespace

Reservation::Reservation(std::uint64_t length_bytes) : length_bytes_(length_bytes) {
  if (length_bytes == 0 || length_bytes % kHugePageBytes != 0 || length_bytes > (1ULL << 46)) {
    throw std::invalid_argument("a reservation takes whole huge pages, at least one, up to 64 TiB");
  }
  // What is left before and after keeps other mappings away: a write past the end is a fault, and
  // the kernel's account of the range (smaps) never runs into a neighbour's.
  mapped_bytes_ = length_bytes + 2 * kHugePageBytes;
  void* mapped =
      ::mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw_errno(errno, "cannot reserve address space");
  mapped_ = static_cast<std::byte*>(mapped);
  const auto misaligned_bytes = reinterpret_cast<std::uintptr_t>(mapped_) % kHugePageBytes;
  data_ = mapped_ + (kHugePageBytes - misaligned_bytes);
}

Reservation::~Reservation() { close(); }

std::byte* Reservation::checked(std::uint64_t offset_bytes, std::uint64_t length_bytes) const {
  if (data_ == nullptr) throw std::logic_error("the reservation is closed");
  if (offset_bytes % kHugePageBytes != 0 || length_bytes % kHugePageBytes != 0) {
    throw std::invalid_argument("memory is given and taken back in whole huge pages");
  }
  if (offset_bytes > length_bytes_ || length_bytes > length_bytes_ - offset_bytes) {
    throw std::out_of_range("the range lies outside the reservation");
  }
  return data_ + offset_bytes;
}

void Reservation::commit(std::uint64_t offset_bytes, std::uint64_t length_bytes) {
  std::byte* start = checked(offset_bytes, length_bytes);
  if (length_bytes == 0) return;
  if (::mprotect(start, length_bytes, PROT_READ | PROT_WRITE) != 0) {
    throw_errno(errno, "cannot make reserved memory writable");
  }
  // A wish: without huge pages everything works, only slower.
  (void)::madvise(start, length_bytes, MADV_HUGEPAGE);
  if (const int error_number = populate(start, length_bytes); error_number != 0) {
    release(offset_bytes, length_bytes);
    throw_errno(error_number, "cannot get memory");
  }
}

void Reservation::release(std::uint64_t offset_bytes, std::uint64_t length_bytes) {
  std::byte* start = checked(offset_bytes, length_bytes);
  if (length_bytes == 0) return;
  // A fresh mapping in the old one's place frees the pages, takes the write permission and the
  // charge for it away, and joins the rest of the reservation, all in one call.
  void* fresh = ::mmap(start, length_bytes, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (fresh == MAP_FAILED) throw_errno(errno, "cannot give memory back");
}

void Reservation::close() {
  if (data_ == nullptr) return;
  ::munmap(mapped_, mapped_bytes_);
  data_ = nullptr;
}

}  // namespace freetoken::host
