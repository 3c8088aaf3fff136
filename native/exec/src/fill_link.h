// Copies expert records from the bank into slots in the background, as fast as memory allows or at
// the rate of a link that it stands for.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "fill.h"

namespace freetoken::exec {

struct FillTotals {
  std::uint64_t fills_count = 0;
  std::uint64_t bytes = 0;
  double busy_s = 0.0;  // from a submission's start on the link to its end, rests between left out
};

class FillLink {
 public:
  struct Layout {
    const std::byte* bank;
    std::size_t record_bytes;
    std::size_t experts_count;
    std::byte* slots;
    std::size_t slots_capacity;  // the most there can ever be
  };

  // `rate_bytes_per_s`: 0 for no limit, or at least 1000. Throws std::invalid_argument.
  FillLink(const Layout& layout, double rate_bytes_per_s);
  ~FillLink();
  FillLink(const FillLink&) = delete;
  FillLink& operator=(const FillLink&) = delete;

  // Queues copies behind those queued before, reads the list at once, and returns its ticket.
  // `slots_count`: slots that exist now. Throws std::out_of_range, and queues nothing, when a fill
  // lies outside the bank or the slots; std::logic_error once it is stopped.
  std::uint64_t submit(const Fill* fills, std::size_t fills_count, std::size_t slots_count);
  // Returns when this and every earlier submission is in its slots. Throws std::out_of_range for
  // a ticket that was never given, std::logic_error when the link was stopped before.
  void wait(std::uint64_t ticket);
  // Waits for everything that is queued.
  void drain();
  // Ends after the running record; what is still queued is not copied, and no more can be. The
  // memory may go afterwards. May be called twice.
  void stop();

  [[nodiscard]] FillTotals totals() const;
  [[nodiscard]] double rate_bytes_per_s() const { return rate_bytes_per_s_.load(); }
  // Holds from the next record on.
  void set_rate_bytes_per_s(double rate_bytes_per_s);

 private:
  using Clock = std::chrono::steady_clock;
  struct Job {
    std::vector<Fill> fills;
    Clock::time_point submitted;
  };

  void run();
  void await(std::unique_lock<std::mutex>& lock, std::uint64_t ticket);
  // False when it was told to stop half-way.
  bool copy(const Job& job);
  void finish(const Job& job, Clock::time_point started, Clock::time_point ended);

  const Layout layout_;
  std::atomic<double> rate_bytes_per_s_;
  std::atomic<bool> stop_{false};
  std::mutex join_mutex_;
  mutable std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable done_;
  std::deque<Job> jobs_;
  std::uint64_t submitted_count_ = 0;
  std::uint64_t done_count_ = 0;
  FillTotals totals_;
  Clock::time_point free_at_;  // when the link is through with what went before
  std::thread thread_;
};

}  // namespace freetoken::exec
