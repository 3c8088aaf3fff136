#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>

#include "read_queue.hpp"

namespace freetoken::host {
namespace {

// More than any kernel so far knows up to IORING_OP_READ (5.6).
constexpr unsigned kProbeOps = 64;

long sys_setup(unsigned entries, io_uring_params* params) {
  return ::syscall(__NR_io_uring_setup, entries, params);
}
long sys_enter(int fd, unsigned to_submit, unsigned min_complete, unsigned flags) {
  return ::syscall(__NR_io_uring_enter, fd, to_submit, min_complete, flags, nullptr, 0);
}
long sys_register(int fd, unsigned opcode, void* argument, unsigned count) {
  return ::syscall(__NR_io_uring_register, fd, opcode, argument, count);
}

[[noreturn]] void fail(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), what);
}

bool read_is_supported(int fd) {
  constexpr std::size_t kBytes = sizeof(io_uring_probe) + kProbeOps * sizeof(io_uring_probe_op);
  alignas(io_uring_probe) std::array<std::byte, kBytes> buffer{};
  if (sys_register(fd, IORING_REGISTER_PROBE, buffer.data(), kProbeOps) < 0) return false;
  io_uring_probe_op op{};
  std::memcpy(&op, buffer.data() + sizeof(io_uring_probe) + IORING_OP_READ * sizeof(op),
              sizeof(op));
  return (op.flags & IO_URING_OP_SUPPORTED) != 0;
}

class UringQueue final : public ReadQueue {
 public:
  explicit UringQueue(std::uint32_t capacity) : capacity_(capacity) {
    io_uring_params params{};
    const long fd = sys_setup(capacity, &params);
    if (fd < 0) fail(errno, "io_uring_setup");
    fd_ = static_cast<int>(fd);
    if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0 || !read_is_supported(fd_)) {
      release();
      fail(ENOSYS, "io_uring without IORING_OP_READ");
    }
    try {
      map_rings(params);
    } catch (...) {
      release();
      throw;
    }
  }

  ~UringQueue() override { release(); }
  UringQueue(const UringQueue&) = delete;
  UringQueue& operator=(const UringQueue&) = delete;

  [[nodiscard]] std::uint32_t capacity() const override { return capacity_; }

  void submit(const ReadRequest& request) override {
    const unsigned tail = sq_tail_->load(std::memory_order_relaxed);
    const unsigned slot = tail & sq_mask_;
    io_uring_sqe& entry = entries_[slot];
    std::memset(&entry, 0, sizeof(entry));
    entry.opcode = IORING_OP_READ;
    entry.fd = request.fd;
    entry.off = request.offset_bytes;
    entry.addr = reinterpret_cast<std::uintptr_t>(request.destination);
    entry.len = request.length_bytes;
    entry.user_data = request.token;
    sq_array_[slot] = slot;
    sq_tail_->store(tail + 1, std::memory_order_release);
    ++unsubmitted_;
  }

  std::size_t wait(std::span<ReadCompletion> out) override {
    for (;;) {
      if (unsubmitted_ == 0) {
        if (const std::size_t count = take(out); count > 0) return count;
      }
      const long submitted = sys_enter(fd_, unsubmitted_, 1, IORING_ENTER_GETEVENTS);
      if (submitted >= 0) {
        unsubmitted_ -= static_cast<unsigned>(submitted);
      } else if (errno == EAGAIN || errno == EBUSY) {
        // The kernel is out of request memory for a moment.
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      } else if (errno != EINTR) {
        fail(errno, "io_uring_enter");
      }
      if (const std::size_t count = take(out); count > 0) return count;
    }
  }

 private:
  using Counter = std::atomic<unsigned>;
  static_assert(sizeof(Counter) == sizeof(unsigned) && Counter::is_always_lock_free);

  void map_rings(const io_uring_params& params) {
    const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    ring_bytes_ = std::max(sq_bytes, cq_bytes);
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    ring_ = map(ring_bytes_, IORING_OFF_SQ_RING);
    entries_ = static_cast<io_uring_sqe*>(map(entries_bytes_, IORING_OFF_SQES));
    auto* base = static_cast<std::byte*>(ring_);
    sq_tail_ = reinterpret_cast<Counter*>(base + params.sq_off.tail);
    sq_mask_ = *reinterpret_cast<unsigned*>(base + params.sq_off.ring_mask);
    sq_array_ = reinterpret_cast<unsigned*>(base + params.sq_off.array);
    cq_head_ = reinterpret_cast<Counter*>(base + params.cq_off.head);
    cq_tail_ = reinterpret_cast<Counter*>(base + params.cq_off.tail);
    cq_mask_ = *reinterpret_cast<unsigned*>(base + params.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
  }

  [[nodiscard]] void* map(std::size_t bytes, std::uint64_t offset) const {
    void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                           static_cast<off_t>(offset));
    if (address == MAP_FAILED) fail(errno, "cannot map the io_uring");
    return address;
  }

  std::size_t take(std::span<ReadCompletion> out) {
    unsigned head = cq_head_->load(std::memory_order_relaxed);
    const unsigned tail = cq_tail_->load(std::memory_order_acquire);
    std::size_t count = 0;
    for (; head != tail && count < out.size(); ++head, ++count) {
      const io_uring_cqe& entry = completions_[head & cq_mask_];
      out[count] = {.token = entry.user_data, .result = entry.res};
    }
    cq_head_->store(head, std::memory_order_release);
    return count;
  }

  void release() {
    if (entries_ != nullptr) ::munmap(entries_, entries_bytes_);
    if (ring_ != nullptr) ::munmap(ring_, ring_bytes_);
    if (fd_ >= 0) ::close(fd_);
    entries_ = nullptr;
    ring_ = nullptr;
    fd_ = -1;
  }

  std::uint32_t capacity_;
  int fd_ = -1;
  void* ring_ = nullptr;
  std::size_t ring_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  std::size_t entries_bytes_ = 0;
  Counter* sq_tail_ = nullptr;
  unsigned sq_mask_ = 0;
  unsigned* sq_array_ = nullptr;
  Counter* cq_head_ = nullptr;
  Counter* cq_tail_ = nullptr;
  unsigned cq_mask_ = 0;
  io_uring_cqe* completions_ = nullptr;
  unsigned unsubmitted_ = 0;
};

}  // namespace

std::unique_ptr<ReadQueue> make_uring_queue(std::uint32_t capacity) {
  return std::make_unique<UringQueue>(capacity);
}

std::string uring_refusal() {
  try {
    const UringQueue probe(1);
    return "";
  } catch (const std::system_error& error) {
    return error.what();
  }
}

}  // namespace freetoken::host
