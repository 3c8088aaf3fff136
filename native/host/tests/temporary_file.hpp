// A file with known bytes that is removed at the end, and a memfd to load into.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "mapping.hpp"

namespace freetoken::host::test {

inline std::vector<unsigned char> pattern(std::size_t length_bytes, std::uint64_t seed) {
  std::vector<unsigned char> bytes(length_bytes);
  std::uint64_t state = seed * 0x9E3779B97F4A7C15ULL + 1;
  for (unsigned char& byte : bytes) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    byte = static_cast<unsigned char>(state >> 56);
  }
  return bytes;
}

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::vector<unsigned char>& bytes) {
    path_ = (std::filesystem::temp_directory_path() / "freetoken-test-XXXXXX").string();
    fd_ = ::mkstemp(path_.data());
    CHECK(fd_ >= 0);
    std::size_t written = 0;
    while (written < bytes.size()) {
      const ssize_t count = ::write(fd_, bytes.data() + written, bytes.size() - written);
      CHECK(count > 0);
      written += static_cast<std::size_t>(count);
    }
  }
  ~TemporaryFile() {
    ::close(fd_);
    ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }
  void truncate(std::uint64_t length_bytes) const {
    CHECK_EQUAL(::ftruncate(fd_, static_cast<off_t>(length_bytes)), 0);
  }

 private:
  std::string path_;
  int fd_ = -1;
};

// The mapping may be longer than the file: what lies beyond cannot be written.
inline std::shared_ptr<Mapping> memory(std::uint64_t mapped_bytes, std::uint64_t file_bytes) {
  const int fd = ::memfd_create("freetoken-test", MFD_CLOEXEC);
  CHECK(fd >= 0);
  CHECK_EQUAL(::ftruncate(fd, static_cast<off_t>(file_bytes)), 0);
  auto mapping = std::make_shared<Mapping>(fd, mapped_bytes);
  ::close(fd);
  return mapping;
}

}  // namespace freetoken::host::test
