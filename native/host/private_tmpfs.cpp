#include "private_tmpfs.hpp"

#include <fcntl.h>
#include <linux/mount.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

namespace freetoken::host {
namespace {

// Everything up to `receive_file` also runs in a child of a process with threads: system calls
// and the stack only, no memory from the heap, no locks. Failures are negated errnos.

int set_option(int context, const char* key, const char* value) {
  return static_cast<int>(::syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, key, value, 0));
}

int make_file(const char* size_text) {
  const auto context = static_cast<int>(::syscall(SYS_fsopen, "tmpfs", FSOPEN_CLOEXEC));
  if (context < 0) return -errno;
  int file = -1;
  if (set_option(context, "huge", "advise") == 0 && set_option(context, "size", size_text) == 0 &&
      set_option(context, "mode", "0700") == 0 &&
      ::syscall(SYS_fsconfig, context, FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) == 0) {
    const auto mount =
        static_cast<int>(::syscall(SYS_fsmount, context, FSMOUNT_CLOEXEC,
                                   MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC));
    if (mount >= 0) {
      file = ::openat(mount, ".", O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
      const int error = errno;
      ::close(mount);
      errno = error;
    }
  }
  const int result = file >= 0 ? file : -errno;
  ::close(context);
  return result;
}

bool write_text(const char* path, const char* text) {
  const int fd = ::open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const auto length = static_cast<ssize_t>(std::strlen(text));
  const bool complete = ::write(fd, text, static_cast<std::size_t>(length)) == length;
  ::close(fd);
  return complete;
}

struct Message {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  int result = 0;
  iovec part{&result, sizeof(result)};

  msghdr header() {
    msghdr value{};
    value.msg_iov = &part;
    value.msg_iovlen = 1;
    value.msg_control = control.data();
    value.msg_controllen = control.size();
    return value;
  }
};

void send_file(int socket, int result) {
  Message message;
  message.result = result < 0 ? result : 0;
  msghdr header = message.header();
  if (result < 0) {
    header.msg_control = nullptr;
    header.msg_controllen = 0;
  } else {
    cmsghdr* control = CMSG_FIRSTHDR(&header);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(control), &result, sizeof(result));
  }
  ::sendmsg(socket, &header, MSG_NOSIGNAL);
}

int receive_file(int socket) {
  Message message;
  msghdr header = message.header();
  ssize_t count = 0;
  do {
    count = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  } while (count < 0 && errno == EINTR);
  if (count != static_cast<ssize_t>(sizeof(int))) return -EPROTO;
  if (message.result < 0) return message.result;
  const cmsghdr* control = CMSG_FIRSTHDR(&header);
  if (control == nullptr || control->cmsg_type != SCM_RIGHTS) return -EPROTO;
  int file = -1;
  std::memcpy(&file, CMSG_DATA(control), sizeof(file));
  return file;
}

struct IdentityMaps {
  std::array<char, 64> users{};
  std::array<char, 64> groups{};
};

[[noreturn]] void run_child(int socket, const IdentityMaps& maps, const char* size_text) {
  // Without a mapping of our own ids nobody could own the file.
  const bool mapped = write_text("/proc/self/setgroups", "deny") &&
                      write_text("/proc/self/uid_map", maps.users.data()) &&
                      write_text("/proc/self/gid_map", maps.groups.data());
  send_file(socket, mapped ? make_file(size_text) : -EPERM);
  ::_exit(0);
}

// An ordinary user may mount a tmpfs in a user namespace of its own; the file outlives it.
int make_file_in_namespace(const char* size_text) {
  std::array<int, 2> sockets{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets.data()) != 0) return -errno;
  IdentityMaps maps;
  std::snprintf(maps.users.data(), maps.users.size(), "0 %u 1", ::geteuid());
  std::snprintf(maps.groups.data(), maps.groups.size(), "0 %u 1", ::getegid());
  // clone itself instead of fork(): handlers that libraries register for fork must not run, and
  // without an exit signal nobody who watches for children sees this one.
  const long child =
      ::syscall(SYS_clone, CLONE_NEWUSER | CLONE_NEWNS, nullptr, nullptr, nullptr, 0);
  if (child == 0) run_child(sockets[1], maps, size_text);
  const int error = errno;
  ::close(sockets[1]);
  int result = -error;
  if (child > 0) {
    result = receive_file(sockets[0]);
    while (::waitpid(static_cast<pid_t>(child), nullptr, __WALL) < 0 && errno == EINTR) {
    }
  }
  ::close(sockets[0]);
  return result;
}

}  // namespace

int open_private_tmpfs_file(std::uint64_t size_bytes) {
  std::array<char, 32> size_text{};
  std::snprintf(size_text.data(), size_text.size(), "%llu",
                static_cast<unsigned long long>(size_bytes));
  int file = make_file(size_text.data());
  if (file == -EPERM || file == -EACCES) file = make_file_in_namespace(size_text.data());
  if (file < 0) {
    throw std::system_error(-file, std::generic_category(), "cannot make a private tmpfs");
  }
  return file;
}

}  // namespace freetoken::host
