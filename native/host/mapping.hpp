// A shared, read-write mapping of a pool file whose address never changes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace freetoken::host {

inline constexpr std::uint64_t kHugePageBytes = 2ULL << 20;

class Mapping {
 public:
  // Maps the first `length_bytes` of `fd`, aligned to a huge page. The descriptor may be closed
  // afterwards. Throws std::system_error.
  Mapping(int fd, std::uint64_t length_bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::uint64_t length_bytes() const { return length_bytes_; }

  // 0, or the errno of madvise: huge pages are a wish, not a condition.
  [[nodiscard]] int advise_huge() const;
  // Pages touched from here on are spread over these NUMA nodes in turn, whoever touches them.
  // 0, or an errno.
  [[nodiscard]] int interleave(const std::vector<int>& nodes) const;
  // From here on a stray write is a fault instead of a wrong answer. Throws std::system_error.
  void protect_read_only();
  // Publishes `value` at `offset_bytes` (a multiple of 8) after every write made before.
  void store_u64(std::uint64_t offset_bytes, std::uint64_t value);
  [[nodiscard]] std::uint64_t load_u64(std::uint64_t offset_bytes) const;
  // Unmaps. Throws std::logic_error while a loader or a pinner still works on the memory.
  void close();

 private:
  friend class MappingUse;
  [[nodiscard]] std::uint64_t checked_word(std::uint64_t offset_bytes) const;

  std::byte* data_ = nullptr;
  std::uint64_t length_bytes_ = 0;
  bool writable_ = true;
  std::atomic<int> users_{0};
};

// Keeps a mapping mapped while a thread works on it.
class MappingUse {
 public:
  explicit MappingUse(std::shared_ptr<Mapping> mapping);
  ~MappingUse();
  MappingUse(const MappingUse&) = delete;
  MappingUse& operator=(const MappingUse&) = delete;

 private:
  std::shared_ptr<Mapping> mapping_;
};

}  // namespace freetoken::host
