#include "pinner.hpp"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include "native_thread.hpp"

namespace freetoken::host {
namespace {

// Below this a step only costs time: the limit is reached, or memory is gone.
constexpr std::uint64_t kSmallestStepBytes = 2ULL << 20;

// The system calls themselves: sanitizers replace the library's functions by ones that do nothing.
bool lock_memory(const void* address, std::uint64_t length_bytes) {
  return ::syscall(SYS_mlock, address, length_bytes) == 0;
}
void unlock_memory(const void* address, std::uint64_t length_bytes) {
  ::syscall(SYS_munlock, address, length_bytes);
}

// CAP_IPC_LOCK lifts the limit, but only when held in the first user namespace.
bool limit_is_lifted() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("CapEff:")) continue;
    const std::uint64_t effective = std::stoull(line.substr(7), nullptr, 16);
    constexpr int kCapIpcLock = 14;
    if ((effective >> kCapIpcLock & 1U) == 0) return false;
    std::ifstream map("/proc/self/uid_map");
    std::uint64_t inside = 0;
    std::uint64_t outside = 0;
    std::uint64_t count = 0;
    map >> inside >> outside >> count;
    return inside == 0 && outside == 0 && count == 0xFFFFFFFFULL;
  }
  return false;
}

std::uint64_t locked_now_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmLck:")) return std::stoull(line.substr(6)) * 1024;
  }
  return 0;
}

bool memlock_limit_explains(int error_number, std::uint64_t step_bytes, std::uint64_t* limit) {
  rlimit value{};
  if (::getrlimit(RLIMIT_MEMLOCK, &value) != 0 || value.rlim_cur == RLIM_INFINITY) return false;
  *limit = value.rlim_cur;
  if (error_number == EPERM) return true;
  return error_number == ENOMEM && !limit_is_lifted() &&
         locked_now_bytes() + step_bytes > value.rlim_cur;
}

std::string mib(std::uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

Pinner::Pinner(std::shared_ptr<Mapping> mapping, std::uint64_t offset_bytes,
               std::uint64_t length_bytes, std::uint64_t step_bytes)
    : mapping_(std::move(mapping)),
      use_(std::make_unique<MappingUse>(mapping_)),
      offset_bytes_(offset_bytes),
      length_bytes_(length_bytes),
      step_bytes_(step_bytes) {
  if (offset_bytes > mapping_->length_bytes() ||
      length_bytes > mapping_->length_bytes() - offset_bytes) {
    throw std::out_of_range("the range to pin lies outside the pool mapping");
  }
  if (step_bytes < 4096 || step_bytes % 4096 != 0) {
    throw std::invalid_argument("step_bytes must be a positive multiple of 4096");
  }
  progress_.total_bytes = length_bytes;
  thread_ = start_thread("ftk-pin", [this] { run(); });
}

Pinner::~Pinner() { abort(); }

void Pinner::run() {
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed_s = [start] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  std::byte* base = mapping_->data() + offset_bytes_;
  std::uint64_t step_bytes = step_bytes_;
  std::uint64_t pinned_bytes = 0;
  while (pinned_bytes < length_bytes_) {
    if (abort_.load()) {
      const std::lock_guard lock(mutex_);
      progress_.note = "pinning was stopped before it was complete";
      break;
    }
    const std::uint64_t now_bytes = std::min(step_bytes, length_bytes_ - pinned_bytes);
    if (!lock_memory(base + pinned_bytes, now_bytes)) {
      const int error_number = errno;
      // A step that ran out of memory half-way is marked locked although it is not.
      unlock_memory(base + pinned_bytes, now_bytes);
      if (now_bytes > kSmallestStepBytes && error_number != EPERM) {
        step_bytes = std::max(kSmallestStepBytes, (now_bytes / 2) & ~std::uint64_t{4095});
        continue;
      }
      fail(error_number, now_bytes);
      break;
    }
    pinned_bytes += now_bytes;
    const std::lock_guard lock(mutex_);
    progress_.pinned_bytes = pinned_bytes;
    progress_.elapsed_s = elapsed_s();
  }
  const double total_s = elapsed_s();
  const std::lock_guard lock(mutex_);
  progress_.elapsed_s = total_s;
  progress_.done = true;
}

void Pinner::fail(int error_number, std::uint64_t step_bytes) {
  std::uint64_t limit_bytes = 0;
  const bool limited = memlock_limit_explains(error_number, step_bytes, &limit_bytes);
  const std::lock_guard lock(mutex_);
  progress_.error_number = error_number;
  progress_.limited = limited;
  progress_.note = mib(progress_.pinned_bytes) + " of " + mib(length_bytes_) +
                   " of the pool are pinned; the rest stays pageable because ";
  if (limited) {
    progress_.note += "this process may lock at most " + mib(limit_bytes) +
                      " of memory: set LimitMEMLOCK=infinity in the service's unit, or raise "
                      "`ulimit -l` where it is started by hand";
  } else {
    progress_.note += "mlock failed: " + std::generic_category().message(error_number);
  }
}

PinProgress Pinner::progress() const {
  const std::lock_guard lock(mutex_);
  return progress_;
}

void Pinner::abort() {
  abort_.store(true);
  const std::lock_guard lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
  use_.reset();
}

}  // namespace freetoken::host
