// Ends this process when the process at the other end of a descriptor goes away.
#pragma once

#include <memory>
#include <thread>

namespace freetoken::host {

// A native thread, because it must act while the Python interpreter is stuck. Readable data is
// discarded. Destroying the object leaves the thread running: a lifeline that is forgotten must
// still work; only `stop()` ends it.
class Lifeline {
 public:
  // Takes ownership of `fd` (a connected socket or the reading end of a pipe). On end of file or
  // error the thread calls `_exit(exit_code)`. Throws std::system_error.
  Lifeline(int fd, int exit_code);
  ~Lifeline();
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

  // Stops watching and closes the descriptor; for an orderly end. May be called twice.
  void stop();

 private:
  std::thread thread_;
  int fd_ = -1;
  int wake_fd_ = -1;
};

}  // namespace freetoken::host
