#include "lifeline.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <system_error>

#include "native_thread.hpp"

namespace freetoken::host {
namespace {

constexpr short kGone = POLLHUP | POLLRDHUP | POLLERR | POLLNVAL;

// Returns only when woken through `wake_fd`.
void watch(int fd, int wake_fd, int exit_code) {
  std::array<char, 4096> discarded{};
  for (;;) {
    std::array<pollfd, 2> fds{{{fd, POLLIN | POLLRDHUP, 0}, {wake_fd, POLLIN, 0}}};
    if (::poll(fds.data(), fds.size(), -1) < 0) {
      if (errno == EINTR) continue;
      ::_exit(exit_code);
    }
    if (fds[1].revents != 0) return;
    // Data that is still queued no longer matters once the sender is gone. A read of 0 bytes is
    // not the test: on a SOCK_SEQPACKET socket it may be an empty message.
    if ((fds[0].revents & kGone) != 0) ::_exit(exit_code);
    if ((fds[0].revents & POLLIN) != 0) {
      const ssize_t count = ::read(fd, discarded.data(), discarded.size());
      if (count < 0 && errno != EINTR && errno != EAGAIN) ::_exit(exit_code);
    }
  }
}

}  // namespace

Lifeline::Lifeline(int fd, int exit_code) : fd_(fd) {
  wake_fd_ = ::eventfd(0, EFD_CLOEXEC);
  if (wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  const int wake_fd = wake_fd_;
  thread_ =
      start_thread("ftk-lifeline", [fd, wake_fd, exit_code] { watch(fd, wake_fd, exit_code); });
}

Lifeline::~Lifeline() {
  if (thread_.joinable()) thread_.detach();
}

void Lifeline::stop() {
  if (!thread_.joinable()) return;
  const std::uint64_t one = 1;
  while (::write(wake_fd_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  thread_.join();
  ::close(wake_fd_);
  ::close(fd_);
  fd_ = wake_fd_ = -1;
}

}  // namespace freetoken::host
