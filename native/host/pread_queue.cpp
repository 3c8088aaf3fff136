#include <unistd.h>

#include <cerrno>

#include "read_queue.hpp"

namespace freetoken::host {
namespace {

class PreadQueue final : public ReadQueue {
 public:
  [[nodiscard]] std::uint32_t capacity() const override { return 1; }

  void submit(const ReadRequest& request) override {
    ssize_t count = 0;
    do {
      count = ::pread(request.fd, request.destination, request.length_bytes,
                      static_cast<off_t>(request.offset_bytes));
    } while (count < 0 && errno == EINTR);
    done_ = {.token = request.token, .result = count < 0 ? -std::int64_t{errno} : count};
    outstanding_ = true;
  }

  std::size_t wait(std::span<ReadCompletion> out) override {
    if (!outstanding_) return 0;
    out[0] = done_;
    outstanding_ = false;
    return 1;
  }

 private:
  ReadCompletion done_;
  bool outstanding_ = false;
};

}  // namespace

std::unique_ptr<ReadQueue> make_pread_queue() { return std::make_unique<PreadQueue>(); }

}  // namespace freetoken::host
