// Locks pool memory in small steps in the background.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "mapping.hpp"

namespace freetoken::host {

struct PinProgress {
  std::uint64_t pinned_bytes = 0;  // a prefix of the range
  std::uint64_t total_bytes = 0;
  bool done = false;     // finished, failed or aborted
  int error_number = 0;  // errno of the step that failed; 0 if none did
  bool limited = false;  // the failure was the limit on locked memory
  double elapsed_s = 0.0;
  std::string note;  // one sentence; empty while all is well
};

// Starts at once. What was locked stays locked after a failure or an abort, until the mapping is
// closed: pinned memory is useful for the layers it covers.
class Pinner {
 public:
  // Locks [offset, offset + length) of the mapping in steps of `step_bytes`.
  Pinner(std::shared_ptr<Mapping> mapping, std::uint64_t offset_bytes, std::uint64_t length_bytes,
         std::uint64_t step_bytes);
  ~Pinner();
  Pinner(const Pinner&) = delete;
  Pinner& operator=(const Pinner&) = delete;

  PinProgress progress() const;
  // Ends after the step that is running; joins the thread.
  void abort();

 private:
  void run();
  void fail(int error_number, std::uint64_t step_bytes);

  std::shared_ptr<Mapping> mapping_;
  std::unique_ptr<MappingUse> use_;
  std::uint64_t offset_bytes_;
  std::uint64_t length_bytes_;
  std::uint64_t step_bytes_;
  std::atomic<bool> abort_{false};
  std::mutex join_mutex_;
  mutable std::mutex mutex_;
  PinProgress progress_;
  std::thread thread_;
};

}  // namespace freetoken::host
