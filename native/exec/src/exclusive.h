// One caller at a time, checked rather than waited for.
#pragma once
#include <atomic>
#include <stdexcept>

namespace freetoken::exec {

class Exclusive {
 public:
  explicit Exclusive(std::atomic<bool>& busy) : busy_(busy) {
    if (busy_.exchange(true, std::memory_order_acquire)) {
      throw std::logic_error(
          "the executor is running a call of another thread; give each thread its own executor");
    }
  }
  ~Exclusive() { busy_.store(false, std::memory_order_release); }
  Exclusive(const Exclusive&) = delete;
  Exclusive& operator=(const Exclusive&) = delete;

 private:
  std::atomic<bool>& busy_;
};

}  // namespace freetoken::exec
