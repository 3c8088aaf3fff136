#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "check.hpp"
#include "lifeline.hpp"

namespace freetoken::host {
namespace {

// Runs `child` in a new process with one end of a socket pair; returns its pid and the other end.
template <class Child>
std::pair<pid_t, int> start_child(Child child) {
  std::array<int, 2> ends{};
  CHECK_EQUAL(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
  const pid_t pid = ::fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    ::close(ends[0]);
    child(ends[1]);
    ::_exit(99);
  }
  ::close(ends[1]);
  return {pid, ends[0]};
}

int exit_code(pid_t pid) {
  int status = 0;
  CHECK_EQUAL(::waitpid(pid, &status, 0), pid);
  CHECK(WIFEXITED(status));
  return WEXITSTATUS(status);
}

void end_of_file_ends_the_process() {
  const auto [pid, fd] = start_child([](int end) {
    const Lifeline lifeline(end, 3);
    for (;;) ::pause();
  });
  // Data and empty messages are no reason to end; only the close is.
  CHECK_EQUAL(::send(fd, "x", 1, 0), 1);
  CHECK_EQUAL(::send(fd, "", 0, 0), 0);
  CHECK_EQUAL(::waitpid(pid, nullptr, WNOHANG), 0);
  ::close(fd);
  CHECK_EQUAL(exit_code(pid), 3);
}

void a_forgotten_lifeline_still_works() {
  const auto [pid, fd] = start_child([](int end) {
    { const Lifeline lifeline(end, 4); }
    for (;;) ::pause();
  });
  ::close(fd);
  CHECK_EQUAL(exit_code(pid), 4);
}

void stopping_closes_the_descriptor_and_ends_nothing() {
  std::array<int, 2> ends{};
  CHECK_EQUAL(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  Lifeline lifeline(ends[1], 3);
  CHECK_EQUAL(::send(ends[0], "x", 1, 0), 1);
  lifeline.stop();
  lifeline.stop();
  CHECK_EQUAL(::fcntl(ends[1], F_GETFD), -1);
  ::close(ends[0]);
}

}  // namespace
}  // namespace freetoken::host

int main() {
  freetoken::host::end_of_file_ends_the_process();
  freetoken::host::a_forgotten_lifeline_still_works();
  freetoken::host::stopping_closes_the_descriptor_and_ends_nothing();
  return 0;
}
