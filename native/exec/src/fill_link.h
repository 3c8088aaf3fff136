// Copies expert records from the bank into slots in the background, as fast as memory allows or at
// the rate of a link that it stands for. Two lanes: what a decode step waits for goes before what a
// prefill will want later, from the next record on.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "fill.h"

namespace freetoken::exec {

struct FillTotals {
  std::uint64_t fills_count = 0;
  std::uint64_t bytes = 0;
  double busy_s = 0.0;  // of the link, its rests left out
};

enum class FillLane { kUrgent, kBulk };

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

  // Queues copies behind those of the same lane, reads the list at once, and returns its ticket.
  // `slots_count`: slots that exist now. Throws std::out_of_range, and queues nothing, when a fill
  // lies outside the bank or the slots; std::logic_error once it is stopped.
  std::uint64_t submit(const Fill* fills, std::size_t fills_count, std::size_t slots_count,
                       FillLane lane = FillLane::kUrgent);
  // Returns when this and every earlier submission of its lane is in its slots. Throws
  // std::out_of_range for a ticket that was never given, std::logic_error when the link was
  // stopped before.
  void wait(std::uint64_t ticket);
  // Whether `wait` would return at once.
  [[nodiscard]] bool is_done(std::uint64_t ticket) const;
  // Waits for everything that is queued.
  void drain();
  // Ends after the running record; what is still queued is not copied, and no more can be. The
  // memory may go afterwards. May be called twice.
  void stop();

  [[nodiscard]] FillTotals totals() const;
  // When the last urgent submission that ended was in its slots.
  [[nodiscard]] std::chrono::steady_clock::time_point urgent_ended_at() const;
  [[nodiscard]] double rate_bytes_per_s() const { return rate_bytes_per_s_.load(); }
  // Holds from the next record on.
  void set_rate_bytes_per_s(double rate_bytes_per_s);

 private:
  using Clock = std::chrono::steady_clock;
  struct Job {
    std::uint64_t ticket;
    std::vector<Fill> fills;
    std::size_t copied_count;
    Clock::time_point submitted;
  };

  void run();
  // The lane whose next record is to be copied, or null when there is nothing.
  std::deque<Job>* next_lane();
  void await(std::unique_lock<std::mutex>& lock, std::uint64_t ticket);
  // False when it was told to stop half-way.
  // `awaited`: somebody sleeps until this record is there.
  bool copy(const Fill& fill, Clock::time_point submitted, bool awaited);
  void finish_record(std::deque<Job>& lane);

  const Layout layout_;
  std::atomic<double> rate_bytes_per_s_;
  std::atomic<bool> stop_{false};
  std::mutex join_mutex_;
  mutable std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable done_;
  std::deque<Job> urgent_;
  std::deque<Job> bulk_;
  std::uint64_t submitted_count_ = 0;
  std::set<std::uint64_t> open_;  // tickets that are not done
  FillTotals totals_;
  Clock::time_point urgent_ended_at_{};
  // Of the thread alone: when the link may carry the next record at its rate, and when it ended
  // with the last one.
  Clock::time_point due_;
  Clock::time_point free_at_;
  std::thread thread_;
};

}  // namespace freetoken::exec
