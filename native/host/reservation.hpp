// Address space without memory, given memory and freed of it piece by piece: base never changes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace freetoken::host {

class Reservation {
 public:
  // Reserves `length_bytes` (a positive multiple of a huge page) aligned to a huge page; nothing of
  // it can be touched yet. Throws std::system_error, std::invalid_argument.
  explicit Reservation(std::uint64_t length_bytes);
  ~Reservation();
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::uint64_t length_bytes() const { return length_bytes_; }

  // Makes the range readable and writable and gives it zeroed memory at once, so that a lack of
  // memory shows here and not at the first write. Either all of the range has memory afterwards or
  // none: throws std::system_error when the kernel refuses. Offset and length are multiples of a
  // huge page; no part of the range has memory yet.
  void commit(std::uint64_t offset_bytes, std::uint64_t length_bytes);
  // Gives the range's memory back and makes it untouchable. Throws std::system_error.
  void release(std::uint64_t offset_bytes, std::uint64_t length_bytes);
  // Gives everything back. May be called twice.
  void close();

 private:
  [[nodiscard]] std::byte* checked(std::uint64_t offset_bytes, std::uint64_t length_bytes) const;

  std::byte* data_ = nullptr;
  std::uint64_t length_bytes_ = 0;
  std::byte* mapped_ = nullptr;
  std::uint64_t mapped_bytes_ = 0;
};

}  // namespace freetoken::host
