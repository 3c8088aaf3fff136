#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "check.hpp"
#include "private_tmpfs.hpp"

namespace {

constexpr long kTmpfsMagic = 0x01021994;

// Whether it can be made depends on the machine; what must hold depends on that.
void the_file_is_private_or_the_refusal_has_a_reason() {
  constexpr std::uint64_t kSizeBytes = 8ULL << 20;
  int fd = -1;
  try {
    fd = freetoken::host::open_private_tmpfs_file(kSizeBytes);
  } catch (const std::system_error& error) {
    CHECK(error.code().value() != 0);
    return;
  }
  struct statfs system {};
  struct stat status {};
  CHECK_EQUAL(::fstatfs(fd, &system), 0);
  CHECK_EQUAL(::fstat(fd, &status), 0);
  CHECK_EQUAL(static_cast<long>(system.f_type), kTmpfsMagic);
  CHECK_EQUAL(
      static_cast<std::uint64_t>(system.f_blocks) * static_cast<std::uint64_t>(system.f_bsize),
      kSizeBytes);
  CHECK_EQUAL(status.st_nlink, 0U);
  CHECK_EQUAL(status.st_uid, ::geteuid());
  CHECK_EQUAL(status.st_mode & 0777U, 0600U);
  ::close(fd);
}

}  // namespace

int main() {
  the_file_is_private_or_the_refusal_has_a_reason();
  return 0;
}
