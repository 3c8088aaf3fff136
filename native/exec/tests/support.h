// What the tests of the executor share.
#pragma once
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

#include "bf16.h"
#include "layout.h"

namespace freetoken::exec::test {

// A page that may not be touched follows the last byte: reading or writing one byte too far ends
// the test in every build, also inside vector code that sanitizers do not see.
template <class T>
class Guarded {
 public:
  explicit Guarded(std::size_t count) : count_(count) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t used = round_up(count * sizeof(T), page);
    length_bytes_ = used + page;
    memory_ =
        mmap(nullptr, length_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) std::abort();
    auto* bytes = static_cast<std::byte*>(memory_);
    if (mprotect(bytes + used, page, PROT_NONE) != 0) std::abort();
    data_ = reinterpret_cast<T*>(bytes + used - count * sizeof(T));
  }
  ~Guarded() { munmap(memory_, length_bytes_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() { return data_; }
  T& operator[](std::size_t index) { return data_[index]; }
  std::size_t size() const { return count_; }

 private:
  std::size_t count_;
  std::size_t length_bytes_ = 0;
  void* memory_ = nullptr;
  T* data_ = nullptr;
};

// New in every run, so that what these numbers hide is found with the next ones. A run prints it;
// FREETOKEND_TEST_SEED set to it repeats the run.
inline std::uint64_t run_seed() {
  static const std::uint64_t seed = [] {
    std::random_device device;
    const char* const given = std::getenv("FREETOKEND_TEST_SEED");
    const std::uint64_t chosen = given != nullptr
                                     ? std::strtoull(given, nullptr, 10)
                                     : std::uint64_t{device()} << 32U | std::uint64_t{device()};
    std::cout << "FREETOKEND_TEST_SEED=" << chosen << std::endl;
    return chosen;
  }();
  return seed;
}

// A small generator of values in [-1, 1): of one run and one seed always the same.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(((seed * 0x9e3779b97f4a7c15U) ^ run_seed()) | 1U) {
    for (int i = 0; i < 8; ++i) next();  // states that differ in a few bits begin alike
  }
  float next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<float>(state_ >> 40) / static_cast<float>(1 << 23) - 1.0F;
  }
  std::uint32_t bits() {
    next();
    return static_cast<std::uint32_t>(state_ >> 32);
  }
  template <class Buffer>
  void fill_bf16(Buffer& buffer) {
    for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] = float_to_bf16(next());
  }
  template <class Buffer>
  void fill(Buffer& buffer) {
    for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] = next();
  }

 private:
  std::uint64_t state_;
};

}  // namespace freetoken::exec::test
