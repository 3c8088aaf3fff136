// Aligned memory that is kept between calls and only grows.
#pragma once
#include <cstddef>
#include <memory>
#include <new>
#include <span>

namespace freetoken::exec {

class Scratch {
 public:
  static constexpr std::size_t kAlignment = 64;

  // At least `count` elements; contents are unspecified.
  template <class T>
  T* get(std::size_t count) {
    reserve(count * sizeof(T));
    return reinterpret_cast<T*>(data_.get());
  }
  std::size_t capacity_bytes() const { return capacity_bytes_; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{kAlignment}); }
  };

  void reserve(std::size_t length_bytes) {
    if (length_bytes <= capacity_bytes_) return;
    data_.reset();
    capacity_bytes_ = 0;
    // A quarter more, so that a context growing token by token does not allocate every time.
    const std::size_t wanted = length_bytes + length_bytes / 4;
    data_.reset(new (std::align_val_t{kAlignment}) std::byte[wanted]);
    capacity_bytes_ = wanted;
  }

  std::unique_ptr<std::byte[], Free> data_;
  std::size_t capacity_bytes_ = 0;
};

}  // namespace freetoken::exec
