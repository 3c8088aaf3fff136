#include "mapping.hpp"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <stdexcept>
#include <system_error>

namespace freetoken::host {
namespace {

[[noreturn]] void throw_errno(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::uint64_t round_up_to_page(std::uint64_t bytes) {
  constexpr std::uint64_t kPageBytes = 4096;
  return (bytes + kPageBytes - 1) & ~(kPageBytes - 1);
}

}  // namespace

Mapping::Mapping(int fd, std::uint64_t length_bytes) : length_bytes_(length_bytes) {
  if (length_bytes == 0 || length_bytes > (1ULL << 46)) {
    throw std::invalid_argument("a pool mapping must have between 1 byte and 64 TiB");
  }
  // Reserve more than needed, so that the pool can start at a huge page whatever the kernel picks.
  const std::uint64_t reserved_bytes = length_bytes + kHugePageBytes;
  void* reserved = ::mmap(nullptr, reserved_bytes, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) throw_errno("cannot reserve address space for the pool");
  auto* start = static_cast<std::byte*>(reserved);
  const auto misaligned_bytes = reinterpret_cast<std::uintptr_t>(start) % kHugePageBytes;
  const auto before_bytes = misaligned_bytes == 0 ? 0 : kHugePageBytes - misaligned_bytes;
  void* mapped = ::mmap(start + before_bytes, length_bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved, reserved_bytes);
    errno = error;
    throw_errno("cannot map the pool file");
  }
  if (before_bytes > 0) ::munmap(start, before_bytes);
  const auto used_bytes = before_bytes + round_up_to_page(length_bytes);
  const auto all_bytes = round_up_to_page(reserved_bytes);
  if (all_bytes > used_bytes) ::munmap(start + used_bytes, all_bytes - used_bytes);
  data_ = static_cast<std::byte*>(mapped);
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, length_bytes_);
}

int Mapping::advise_huge() const {
  return ::madvise(data_, length_bytes_, MADV_HUGEPAGE) == 0 ? 0 : errno;
}

int Mapping::interleave(const std::vector<int>& nodes) const {
  constexpr int kNodesLimit = 1024;  // the kernel's largest CONFIG_NODES_SHIFT
  constexpr std::size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
  if (data_ == nullptr) throw std::logic_error("the pool mapping is closed");
  unsigned long mask[kNodesLimit / kWordBits] = {};
  for (const int node : nodes) {
    if (node < 0 || node >= kNodesLimit) return EINVAL;
    const auto bit = static_cast<std::size_t>(node);
    mask[bit / kWordBits] |= 1UL << bit % kWordBits;
  }
  // The policy of a shared mapping belongs to the file, so it holds for every thread and process.
  // glibc has no wrapper. The kernel reads one bit less than it is told.
  const long result =
      ::syscall(SYS_mbind, data_, length_bytes_, MPOL_INTERLEAVE, mask, kNodesLimit + 1, 0);
  return result == 0 ? 0 : errno;
}

void Mapping::protect_read_only() {
  if (data_ == nullptr) throw std::logic_error("the pool mapping is closed");
  if (::mprotect(data_, length_bytes_, PROT_READ) != 0) {
    throw_errno("cannot make the pool mapping read-only");
  }
  writable_ = false;
}

std::uint64_t Mapping::checked_word(std::uint64_t offset_bytes) const {
  if (data_ == nullptr) throw std::logic_error("the pool mapping is closed");
  if (offset_bytes % 8 != 0 || offset_bytes + 8 > length_bytes_) {
    throw std::out_of_range("a word of the pool must be aligned and inside the mapping");
  }
  return offset_bytes;
}

void Mapping::store_u64(std::uint64_t offset_bytes, std::uint64_t value) {
  auto* word = reinterpret_cast<std::uint64_t*>(data_ + checked_word(offset_bytes));
  if (!writable_) throw std::logic_error("the pool mapping is read-only");
  std::atomic_ref<std::uint64_t>(*word).store(value, std::memory_order_seq_cst);
}

std::uint64_t Mapping::load_u64(std::uint64_t offset_bytes) const {
  auto* word = reinterpret_cast<std::uint64_t*>(data_ + checked_word(offset_bytes));
  return std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_seq_cst);
}

void Mapping::close() {
  if (data_ == nullptr) return;
  if (users_.load() != 0) {
    throw std::logic_error("the pool mapping is in use by a load or by pinning");
  }
  ::munmap(data_, length_bytes_);
  data_ = nullptr;
}

MappingUse::MappingUse(std::shared_ptr<Mapping> mapping) : mapping_(std::move(mapping)) {
  if (mapping_->data() == nullptr) throw std::logic_error("the pool mapping is closed");
  mapping_->users_.fetch_add(1);
}

MappingUse::~MappingUse() { mapping_->users_.fetch_sub(1); }

}  // namespace freetoken::host
